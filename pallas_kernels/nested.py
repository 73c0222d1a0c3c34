"""Weights that a draft reads in part: with 16-bit activations a product reads all of a weight, with
8- or 4-bit ones a 4-bit weight of the same matrix, in arrays of its own.

    NestedWeight       a bfloat16 matrix, exactly, and beside it the 4-bit one
    NestedInt8Weight   an 8-bit matrix whose high nibbles are the 4-bit one

A bfloat16 matrix takes 12 bits a weight (`pallas_kernels.bfloat12`), so a `NestedWeight` is about
as large as the matrix was. `pallas_kernels.planes` takes nested weights apart.
"""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.arrays import Arrays
from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import Bfloat16Weight, Int4Weight, Mxfp4Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NestedWeight(Arrays):
    """A matrix that "a16" reads exactly, and "a8" and "a4" read in 4 bits.

    exact: (N, K).
    draft: (N, K), the same matrix in 4 bits.
    """

    exact: Bfloat12Weight | Bfloat16Weight
    draft: Int4Weight | Mxfp4Weight

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.exact.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NestedInt8Weight(Arrays):
    """A matrix that "a16" reads in 8 bits, and "a8" and "a4" read in 4, g = k // group_size:

        w[n, k] = (16 · q[n, k] + r[n, k]) · scales[n, g] / 16
        draft[n, k] = q[n, k] · scales[n, g]

    packed: uint8[N, ceil(K / 256) · 128], q in -7 … 7, laid out as in an `Int4Weight`.
    scales: bf16, f16 or f32[N, groups], as in an `Int4Weight`.
    rest: uint8 of the shape of `packed`, r in -8 … 7, laid out in the same way.
    in_features: K, before padding.
    group_size: inputs per scale: 32, 64, 128 or None.
    out_features: N if the rows are interleaved, else None.
    """

    packed: jax.Array
    scales: jax.Array
    rest: jax.Array
    in_features: int = jax.tree.static()
    group_size: int | None = jax.tree.static(default=128)
    out_features: int | None = jax.tree.static(default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.out_features or self.packed.shape[0], self.in_features


Nested = NestedWeight | NestedInt8Weight
