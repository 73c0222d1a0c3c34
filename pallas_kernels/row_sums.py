"""Sums over the last axis in an order that depends only on its length.

XLA orders a reduction by the shape of the whole array. It may also compile the reduction and the
exponentials around it with different libraries for one row and for two. Additions of whole arrays
are vector operations whose order is fixed. A row's sums therefore have the same bits for any number
of rows, with or without the C++ library.

Terms must not be products, because a compiler may fuse a product with an addition in some programs
only. Use matrix products (`pallas_kernels.matmul`) for sums of products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

_PARTS = 8  # parts per addition step


def row_sum(x: Float32[Array, "*rows N"]) -> Float32[Array, "*rows 1"]:
    """Sums over the last axis. f32[..., N] -> f32[..., 1]."""
    return _fold(jnp.add, x, 0.0)


def row_max(x: Float32[Array, "*rows N"]) -> Float32[Array, "*rows 1"]:
    """The largest value of the last axis. f32[..., N] -> f32[..., 1].

    A maximum is the same in any order, but XLA's reduction may change which library computes an
    exponential after it.
    """
    return _fold(jnp.maximum, x, -jnp.inf)


def running_sums(x: Float32[Array, "*rows N"]) -> Float32[Array, "*rows N"]:
    """Cumulative sums over the last axis. f32[..., N] -> f32[..., N]."""
    size = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(size, 0)]

    def double(step: jax.Array, sums: jax.Array) -> jax.Array:
        """Adds to each sum, of 2^step terms, the one that ends where it begins."""
        before = size - (jnp.int32(1) << step)
        return sums + lax.dynamic_slice_in_dim(jnp.pad(sums, padding), before, size, axis=-1)

    # One step of a loop takes less time to compile than a dozen additions.
    summed: jax.Array = lax.fori_loop(0, (size - 1).bit_length(), double, x)
    return summed


def _fold(
    combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, neutral: float
) -> jax.Array:
    """Combines equal parts of the last axis until each row has one value."""
    while x.shape[-1] > 1:
        padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _PARTS)]
        x = jnp.pad(x, padding, constant_values=neutral)
        x = reduce(combine, jnp.split(x, _PARTS, axis=-1))
    return x
