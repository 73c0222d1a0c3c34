"""JSON lines and texts as files hold them: the one reader of prompts, corpora and task sets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Line(NamedTuple):
    """One line of a file, and where it stands, for what is said about it."""

    path: Path
    number: int
    fields: dict[str, Any]

    def text(self, *names: str) -> str:
        """The first of these fields that holds text. Raises ValueError where none does."""
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, str):
                return value
        what = names[0] if len(names) == 1 else f"any of {', '.join(names)}"
        raise ValueError(f"line {self.number} of {self.path} has no text in {what}")

    def get(self, name: str, kind: type[T]) -> T:
        """The field of this name. Raises ValueError where there is none of that type."""
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise ValueError(
                f"line {self.number} of {self.path} has no {kind.__name__} in {name}, got {value!r}"
            )
        return value


def read_lines(path: Path) -> list[Line]:
    """The lines of a file, perhaps gzipped, that are not blank.

    Raises ValueError, with the file and the number of the line, for one that is no JSON object.
    """
    lines = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is no valid JSON: {error}") from None
        lines.append(Line(path, number, fields if isinstance(fields, dict) else {}))
    return lines


def read_text(path: Path) -> str:
    """What a file in UTF-8, perhaps gzipped, holds. Raises ValueError where it is no text."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    if "\0" in text:
        raise ValueError(f"{path} is no text: it holds zero bytes")
    return text


def is_json_lines(path: Path) -> bool:
    """Whether a file's name says so: .jsonl, perhaps .jsonl.gz."""
    return ".jsonl" in path.suffixes
