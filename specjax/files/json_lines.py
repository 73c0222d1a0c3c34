"""The reader of text and JSON lines files: prompts, corpora and task sets."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specjax.checks import shown
from specjax.files.json_objects import parse

T = TypeVar("T")


class Line(NamedTuple):
    """One line of a file, with its place for error messages."""

    path: Path
    number: int
    fields: dict[str, Any]

    def text(self, *names: str, default: str | None = None) -> str:
        """The first of the named fields that holds text; `default` if all are absent or null.

        Raises ValueError if no field holds text, unless `default` takes its place.
        """
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, str):
                return value
        if default is not None and all(self.fields.get(name) is None for name in names):
            return default
        what = names[0] if len(names) == 1 else f"any of {', '.join(names)}"
        raise ValueError(f"line {self.number} of {self.path} has no text in {what}")

    def get(self, name: str, kind: type[T]) -> T:
        """The field of this name. Raises ValueError unless it has this type."""
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise ValueError(
                f"line {self.number} of {self.path} has no {kind.__name__} in {name}, "
                f"got {shown(value)}"
            )
        return value

    def texts(self, name: str) -> list[str]:
        """The texts that the field of this name lists. Raises ValueError unless it lists texts."""
        value = self.get(name, list)
        if not all(isinstance(each, str) for each in value):
            raise ValueError(
                f"line {self.number} of {self.path} must have texts in {name}, got {shown(value)}"
            )
        return value


def read_lines(path: Path) -> list[Line]:
    """The lines of a file that are not blank. The file may be gzipped.

    Raises ValueError, with the file and the line number, if a line is not valid JSON.
    """
    lines = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        fields = parse(line, f"line {number} of {path}")
        lines.append(Line(path, number, fields if isinstance(fields, dict) else {}))
    return lines


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, which may be gzipped. Raises ValueError if it is not text."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error) as error:  # beside OSError
            raise ValueError(f"{path} is truncated or damaged: {error}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    if "\0" in text:
        raise ValueError(f"{path} is not text: it holds zero bytes")
    return text


def is_json_lines(path: Path) -> bool:
    """Whether a file's name ends in .jsonl or .jsonl.gz."""
    return ".jsonl" in path.suffixes
