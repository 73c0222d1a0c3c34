"""Stacks of matrices of one form, of which an operation reads one.

A loop over a model's layers is compiled once, whatever their number. Its body knows the layer's
number only while it runs, and to slice a weight out of a stack would copy it. So `matmul` takes the
stack and the number, and the kernel finds the matrix in its place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.weights import Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """Matrix number `index` of a stack, or the scale of one of its norms.

    stack: a weight in any format, or an array. Each array has one more axis in front, [L, ...].
    index: int32[], in 0 … L - 1.
    """

    stack: Weight
    index: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of one matrix."""
        n, k = taken_shapes(self).shape
        return n, k

    def taken(self) -> Weight:
        """Returns a copy of the matrix."""
        weight: Weight = jax.tree.map(lambda leaf: leaf[self.index], self.stack)
        return weight


def form(weight: Weight | Stacked) -> Weight:
    """Returns the weight itself, or the whole stack, which has the same type and static fields."""
    return weight.stack if isinstance(weight, Stacked) else weight


def taken(weight: Weight | Stacked) -> Weight:
    """Returns the weight itself, or a copy of its matrix in the stack."""
    return weight.taken() if isinstance(weight, Stacked) else weight


def taken_shapes(weight: Weight | Stacked) -> Any:
    """Returns `taken` without a copy: a matrix in a stack has shapes in place of arrays."""
    return jax.eval_shape(Stacked.taken, weight) if isinstance(weight, Stacked) else weight


def in_stack(weight: Weight | Stacked) -> Stacked:
    """Returns the weight as one of a stack: alone, it is a stack of one."""
    if isinstance(weight, Stacked):
        return weight
    return Stacked(jax.tree.map(lambda leaf: leaf[None], weight), jnp.int32(0))
