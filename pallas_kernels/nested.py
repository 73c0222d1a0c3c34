"""A weight in two planes: an exact one, and a 4-bit one of the same matrix that drafts.

The planes are separate arrays. With 16-bit activations a product reads the exact plane alone, with
8- or 4-bit ones the draft plane alone. A bfloat16 matrix takes 12 bits (`pallas_kernels.bfloat12`),
so both planes are about as large as the matrix was.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from pallas_kernels.arrays import Arrays

if TYPE_CHECKING:
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
