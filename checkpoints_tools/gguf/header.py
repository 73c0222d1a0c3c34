"""The header of a GGUF file: its metadata, and where its tensors lie.

The file is mapped into memory, and nothing in it is trusted: every length is compared with the
bytes that are left. Arrays are read only on request. The reader of the `gguf` package does neither,
and takes seconds for the vocabulary of a large model.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np

from specjax.checks import printable, shown

T = TypeVar("T")
MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {  # by the number of a value's type
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
STRING, ARRAY = 8, 9
KINDS: dict[type, str] = {  # of fields: the type that a value has here, and its name
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list of texts",
    np.ndarray: "a list of numbers",
}
MOST_AXES = 4
ALIGNMENT = 32
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor as a header describes it.

    kind: the number of its type in ggml.
    shape: rows first, as NumPy counts; ggml counts the other way round.
    offset: of its first byte in the file.
    """

    name: str
    file: Path
    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array of metadata that has not been read: its items' type, and where they lie."""

    kind: int
    count: int
    start: int


class Header:
    """The metadata and the tensors of one file.

    Args:
      file: its path.

    Raises:
      ValueError: the file is not GGUF, is truncated, or holds something that no version defines.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._bytes = _mapped(file)
        self._place = 0
        self._values: dict[str, Any] = {}
        if self._take(4) != MAGIC:
            raise ValueError(f"{file} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"{file} has GGUF version {version}; supported: 2 and 3")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        for _ in range(self._counted(pairs, 13)):
            name = self._name()
            if name in self._values:
                raise ValueError(f"{file} has the field {shown(name)} twice")
            self._values[name] = self._value(self._number("<I"))
        described = [self._tensor() for _ in range(self._counted(tensors, 24))]
        alignment = self.get("general.alignment", int, ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{file}: general.alignment must be a power of two, got {alignment!r}")
        start = -(-self._place // alignment) * alignment
        self.tensors = {
            each.name: dataclasses.replace(each, offset=start + each.offset) for each in described
        }
        if len(self.tensors) < len(described):
            raise ValueError(f"{file} describes a tensor twice")

    @overload
    def get(self, name: str, kind: type[T]) -> T | None: ...

    @overload
    def get(self, name: str, kind: type[T], default: T) -> T: ...

    def get(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of a field, or the default where the file does not have it.

        Raises ValueError unless it is of the kind: one of KINDS. Integers are numbers too.
        """
        if name not in self._values:
            return default
        value = self._values[name]
        if kind not in _kinds(value):
            raise ValueError(f"{self.file}: {name} must be {KINDS[kind]}, got {_described(value)}")
        return cast("T", self._items(value) if isinstance(value, _Array) else value)

    def names(self) -> Collection[str]:
        """The names of all fields."""
        return self._values.keys()

    def raw(self, offset: int, count: int) -> np.ndarray:
        """Bytes of the file, without a copy: uint8[count]."""
        return np.frombuffer(self._bytes, np.uint8, count, offset)

    @property
    def size(self) -> int:
        """The file's length in bytes."""
        return len(self._bytes)

    def _take(self, count: int) -> bytes:
        start, self._place = self._place, self._place + count
        if self._place > len(self._bytes):
            raise ValueError(
                f"{self.file} is truncated: its header asks for {self._place} bytes, "
                f"it has {len(self._bytes)}"
            )
        return self._bytes[start : self._place]

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def _counted(self, count: int, least: int) -> int:
        """A count of items of at least so many bytes each. Raises ValueError if they cannot fit."""
        if count * least > len(self._bytes) - self._place:
            raise ValueError(
                f"{self.file} is truncated or damaged: its header announces {count} items, "
                f"and {len(self._bytes) - self._place} bytes follow"
            )
        return count

    def _string(self) -> bytes:
        return self._take(self._counted(self._number("<Q"), 1))

    def _name(self) -> str:
        name = self._text(self._string())
        if printable(name) != name:  # from here on, messages hold the names as they are
            raise ValueError(f"{self.file} has a name that cannot be printed: {shown(name)}")
        return name

    def _text(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.file} has text that is not UTF-8: {shown(text)}") from None

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text(self._string())
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise ValueError(f"{self.file} has a value of the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _array(self) -> _Array:
        """Notes where the array lies, and passes over it."""
        kind, count = self._number("<I"), self._number("<Q")
        array = _Array(kind, count, self._place)
        if kind == STRING:
            for _ in range(self._counted(count, 8)):
                length = self._number("<Q")
                self._place += self._counted(length, 1)
        elif kind in SCALARS:
            size = np.dtype(SCALARS[kind]).itemsize
            self._place += self._counted(count, size) * size
        else:
            raise ValueError(f"{self.file} has an array of the unsupported type {kind}")
        return array

    def _items(self, array: _Array) -> list[str] | np.ndarray:
        if array.kind != STRING:
            return np.frombuffer(self._bytes, SCALARS[array.kind], array.count, array.start)
        self._place = array.start
        return [self._text(self._string()) for _ in range(array.count)]

    def _tensor(self) -> GgufTensor:
        name, axes = self._name(), self._number("<I")
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"{self.file}: the tensor {name} has {axes} axes; accepted: 1 to 4")
        shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
        if not 0 < math.prod(shape) < 2**48:
            raise ValueError(f"{self.file}: the tensor {name} has the impossible shape {shape}")
        return GgufTensor(name, self.file, self._number("<I"), shape, self._number("<Q"))


def read_headers(file: Path) -> list[Header]:
    """The headers of a model: one, or those of all parts of a model that is split.

    Args:
      file: the file, or the first part, whose name ends in -00001-of-0000N.gguf.

    Raises:
      FileNotFoundError: a part is missing.
      ValueError: a file is damaged, or is not the first part.
    """
    first = Header(file)
    count = first.get("split.count", int, 1)
    if count < 2:
        return [first]
    name = _SPLIT.fullmatch(file.name)
    if name is None or int(name[2]) != 1 or int(name[3]) != count:
        raise ValueError(
            f"{file} is one of {count} parts; give the first one, named …-00001-of-{count:05}.gguf"
        )
    rest = [file.with_name(f"{name[1]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]
    for part in rest:
        if not part.is_file():
            raise FileNotFoundError(f"{file} is one of {count} parts; {part.name} does not exist")
    return [first, *map(Header, rest)]


def _kinds(value: Any) -> tuple[type, ...]:
    """The keys of KINDS that a value is one of."""
    if isinstance(value, _Array):
        return (list,) if value.kind == STRING else (np.ndarray,)
    return (int, float) if type(value) is int else (type(value),)


def _described(value: Any) -> str:
    """A value of another kind as a message shows it."""
    return f"an array of {value.count} items" if isinstance(value, _Array) else shown(value)


def is_gguf(file: Path) -> bool:
    """Whether a path is a file that begins as GGUF files do."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        try:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ValueError(f"{file} is not a GGUF file: it is empty") from None
