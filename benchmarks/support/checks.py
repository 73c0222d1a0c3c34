"""A check that raises has failed; the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHOWN = 300  # characters of an error


def tried(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a check, or the error that it raised."""
    try:
        return check()
    except Exception as error:  # a kernel that does not compile, too
        said = " ".join(str(error).split())[:SHOWN]
        return {"passed": False, "error": f"{type(error).__name__}: {said}"}
