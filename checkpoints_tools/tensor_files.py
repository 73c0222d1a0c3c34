"""The safetensors files of a Hugging Face directory: headers first, values one tensor at a time.

Pickled weights (`pytorch_model.bin`) are left out on purpose.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checks import printable, shown
from specjax.files.json_objects import as_object, read_object

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "U8": 1}
FLOATS = ("BF16", "F16", "F32")
ROWS_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as its file's header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of its values in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self) -> np.ndarray:
        """Its values. Raises ValueError if they are not finite."""
        # The file is opened anew for each tensor: the part of a mapped file that has been read
        # counts as this process's memory until the file is closed.
        with _open(self.file) as shard:
            array: np.ndarray = shard.get_tensor(self.name)
        if self.dtype in FLOATS and not _all_finite(array):
            raise ValueError(f"the tensor {self.name} in {self.file} holds NaN or infinity")
        return array

    def weight(self) -> jax.Array:
        """Its values as a JAX array. Raises as `read`."""
        values: jax.Array = jax.device_put(self.read())
        return values


def read_headers(directory: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the shards that an index names, by name.

    Raises:
      FileNotFoundError: both files or a shard are missing.
      ValueError: a file is damaged, or two of them hold a tensor of one name.
    """
    found: dict[str, Tensor] = {}
    for file in _shard_files(directory):
        with _open(file) as shard:
            for name in shard.keys():  # noqa: SIM118
                if printable(name) != name:  # from here on, messages hold the names as they are
                    raise ValueError(
                        f"{file} has a tensor whose name cannot be printed: {shown(name)}"
                    )
                if name in found:
                    raise ValueError(f"the tensor {name} is in {found[name].file} and in {file}")
                header = shard.get_slice(name)
                found[name] = Tensor(name, file, header.get_dtype(), tuple(header.get_shape()))
    return found


def equal(left: Tensor, right: Tensor) -> bool:
    """Whether two matrices hold the same values and dtype; only a few rows are read at a time."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    with _open(left.file) as one, _open(right.file) as other:
        slices = one.get_slice(left.name), other.get_slice(right.name)
        starts = range(0, left.shape[0], ROWS_AT_ONCE)
        parts = [slice(start, min(start + ROWS_AT_ONCE, left.shape[0])) for start in starts]
        return all(np.array_equal(slices[0][part], slices[1][part]) for part in parts)


def _shard_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(
            f"{directory} has neither {single.name} nor {index.name}; "
            "safetensors is the only Hugging Face format that specjax reads"
        )
    names = _listed_shards(index)
    for name in names:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{index} names the shard {name}, which does not exist")
    return [directory / name for name in names]


def _listed_shards(index: Path) -> list[str]:
    """The files that an index names, below its folder."""
    shards = as_object(f"{index}: weight_map", read_object(index).get("weight_map"))
    names = set()
    for name in shards.values():
        # A link may lead out of the folder, as in the Hub's own cache; a name may not.
        if not isinstance(name, str) or printable(name) != name or not _stays_below(name):
            raise ValueError(
                f"{index}: weight_map must name files below its folder, got {shown(name)}"
            )
        names.add(name)
    if not names:
        raise ValueError(f"{index}: weight_map names no file")
    return sorted(names)


def _stays_below(name: str) -> bool:
    """Whether a path stays in the folder that it begins in, on every system."""
    return not {"", ".", ".."} & {*name.split("/")} and "\\" not in name


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged: {printable(error)}") from error


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()
