"""Values between the program's process and the tests': copies of plain ones, and tickets.

A plain value is None, a bool, int, float, complex, str, bytes, list, tuple, dict, set or frozenset
of plain values; one of a derived type arrives as the plain one. A ticket stands for any other
value, which stays where it is. A message is JSON, preceded by its length, so that reading one
runs nothing that the other process chose.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

LONGEST = 1 << 24  # bytes of a message
_LENGTH = struct.Struct("<I")
_AT_ONCE = 1 << 16
_MANY = {"l": list, "t": tuple, "s": set, "z": frozenset}


def send(descriptor: int, message: object) -> None:
    """Writes a message. Raises ValueError where it is too long."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > LONGEST:
        raise ValueError(f"a value takes {len(data)} bytes; at most {LONGEST} are accepted")
    data = _LENGTH.pack(len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Any:
    """Reads a message.

    Raises:
      EOFError: the other process has ended.
      ValueError: the message is too long, or is not a message.
      RecursionError: it is nested too deeply.
    """
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes; at most {LONGEST} are accepted")
    return json.loads(_read(descriptor, length))


def pack(value: object, ticket: Callable[[object], int | str]) -> object:
    """The value as JSON can hold it; `ticket` gives a value that is not plain its ticket."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return ["i", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, bytes):
        return ["b", bytes.hex(value)]
    if isinstance(value, dict):
        return ["d", *(pack(each, ticket) for pair in dict.items(value) for each in pair)]
    for tag, kind in _MANY.items():
        if isinstance(value, kind):
            return [tag, *(pack(each, ticket) for each in kind.__iter__(value))]
    if getattr(value, "ndim", None) == 0:  # NumPy's scalars
        return pack(value.item(), ticket)  # type: ignore[attr-defined]
    return ["o", ticket(value)]


def _read(descriptor: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(descriptor, min(length - len(data), _AT_ONCE))
        if not part:
            raise EOFError("the other process has ended")
        data += part
    return bytes(data)


def unpack(packed: object, object_: Callable[[Any], object]) -> Any:
    """The value of what `pack` gave; `object_` gives the one that a ticket stands for.

    Raises:
      ValueError, TypeError: it is not of that form.
      RecursionError: it is nested too deeply.
    """
    if packed is None or isinstance(packed, bool | str):
        return packed
    if not isinstance(packed, list) or not packed:
        raise ValueError("a value has an unknown form")
    tag, *parts = packed
    if tag == "o" and len(parts) == 1:
        return object_(parts[0])
    if tag == "i" and len(parts) == 1:
        return int(parts[0], 16)
    if tag == "f" and len(parts) == 1:
        return float.fromhex(parts[0])
    if tag == "c" and len(parts) == 2:
        return complex(float.fromhex(parts[0]), float.fromhex(parts[1]))
    if tag == "b" and len(parts) == 1:
        return bytes.fromhex(parts[0])
    values = [unpack(each, object_) for each in parts]
    if tag == "d":
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag not in _MANY:
        raise ValueError("a value has an unknown form")
    return _MANY[tag](values)
