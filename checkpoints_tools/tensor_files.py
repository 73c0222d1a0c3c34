"""The safetensors files of a Hugging Face directory: headers first, values one tensor at a time.

Pickled weights (`pytorch_model.bin`) are left out on purpose.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

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
        return jnp.asarray(self.read())


def read_headers(directory: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the shards that an index names, by name.

    Raises:
      FileNotFoundError: both files or a shard are missing.
      ValueError: a file is damaged.
    """
    found: dict[str, Tensor] = {}
    for file in _shard_files(directory):
        with _open(file) as shard:
            for name in shard.keys():  # noqa: SIM118
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
    if single.exists():
        return [single]
    if not index.exists():
        raise FileNotFoundError(
            f"{directory} has neither {single.name} nor {index.name}; "
            "safetensors is the only Hugging Face format that specjax reads"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a valid index of shards: {error}") from error
    for name in names:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{index} names the shard {name}, which does not exist")
    return [directory / name for name in names]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged: {error}") from error


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()
