"""Sums over the last axis in an order that its length alone fixes.

XLA orders a reduction by the shape of the whole array, and may hand it, with the exponentials
around it, to another library for two rows than for one. Additions of whole arrays leave it no
choice, and each of them is a vector operation. So what is computed from these sums has the same
bits however many rows share the call, with the C++ library or without.

Terms must not be products: a compiler may fuse a product with the addition that follows, in one
program and not in another. Sums of products are matrix products (`pallas_kernels.matmul`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

_PARTS = 8  # that are added at a time


def row_sum(x: Float32[Array, "*rows N"]) -> Float32[Array, "*rows 1"]:
    """Sums over the last axis. f32[..., N] -> f32[..., 1]."""
    return _fold(jnp.add, x, 0.0)


def row_max(x: Float32[Array, "*rows N"]) -> Float32[Array, "*rows 1"]:
    """The largest value of the last axis. f32[..., N] -> f32[..., 1].

    A maximum is the same in any order; this one does not make XLA take another library's
    exponential for what is computed from it.
    """
    return _fold(jnp.maximum, x, -jnp.inf)


def running_sums(x: Float32[Array, "*rows N"]) -> Float32[Array, "*rows N"]:
    """Sums of each value of the last axis and all before it. f32[..., N] -> f32[..., N]."""
    size, distance = x.shape[-1], 1
    while distance < size:
        padding = [(0, 0)] * (x.ndim - 1) + [(distance, 0)]
        x = x + jnp.pad(x, padding)[..., :size]
        distance *= 2
    return x


def _fold(
    combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, neutral: float
) -> jax.Array:
    """Lays equal parts of the last axis upon each other until one value is left of each row."""
    while x.shape[-1] > 1:
        padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _PARTS)]
        x = jnp.pad(x, padding, constant_values=neutral)
        x = reduce(combine, jnp.split(x, _PARTS, axis=-1))
    return x
