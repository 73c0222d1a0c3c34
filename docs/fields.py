"""Griffe extension: the fields that a class's docstring describes become a list.

Docstrings say `name: what it is`, a line per field and indented where it goes on, without a
heading.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

LINES = re.compile(r"^(?:\w+(?:, \w+)*: .*\n?(?:[ ]+.*\n?)*)+", re.MULTILINE)


class Fields(griffe.Extension):
    """Puts the heading that Google's style asks for before the fields of a class."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None and "Attributes:" not in cls.docstring.value:
            cls.docstring.value = LINES.sub(_listed, cls.docstring.value)


def _listed(found: re.Match[str]) -> str:
    """The lines as a section, one field each."""
    lines = [f"  {line}" for line in found[0].rstrip().splitlines()]
    return "\nAttributes:\n" + "\n".join(lines) + "\n"
