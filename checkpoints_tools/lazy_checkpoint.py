"""A foreign model as every reader returns it: a configuration, and weights to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol

import jax

from pallas_kernels.formats import Quantized
from specjax.model.config import ModelConfig


class LazyWeight(Protocol):
    """A weight that lies in a file."""

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""

    def weight(self) -> jax.Array | Quantized:
        """Reads it: an array in the file's dtype, or a quantized weight. Raises ValueError on
        values that are not finite, and on contradictions."""


@dataclasses.dataclass(frozen=True)
class LazyCheckpoint:
    """A model whose headers agree with its configuration.

    tensors: by the library's own names (`specjax.model.weight_names`).
    """

    config: ModelConfig
    tensors: Mapping[str, LazyWeight]

    def weights(self) -> Iterator[tuple[str, jax.Array | Quantized]]:
        """Name and weight of every tensor, read one at a time. Raises as `LazyWeight.weight`."""
        for name, tensor in self.tensors.items():
            yield name, tensor.weight()
