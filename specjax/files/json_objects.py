"""Reads foreign JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specjax.checks import shown

MOST_BYTES = 2**28  # of a file that holds one object; the longest index of shards has 2**23


def parse(text: str | bytes, place: str) -> Any:
    """The value that a JSON text holds.

    Args:
      text: in UTF-8 if it is bytes.
      place: where it comes from, for messages.

    Returns:
      The value.

    Raises:
      ValueError: the text is not JSON, or is nested too deeply to be read.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply to be read") from None


def refuse_constant(name: str) -> None:
    """Raises ValueError: a `parse_constant`, since `json` takes NaN and infinities by default."""
    raise ValueError(f"JSON has no {name}")


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is not JSON, holds another value than an object, or is too long.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} has no {file.name}")
    size = file.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{file} has {size} bytes; accepted: a JSON file of up to {MOST_BYTES}")
    fields = parse(file.read_bytes(), str(file))
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(fields).__name__}")
    return fields


def as_object(name: str, value: Any) -> dict[str, Any]:
    """The value of a field that must be an object. Raises ValueError if it is something else."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {shown(value)}")
    return value
