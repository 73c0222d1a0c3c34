"""Root-mean-square norm whose result for a row does not depend on the other rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference import map_row_tiles


@jax.jit
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) · scale over the last axis. bf16 or f32[..., D] -> f32[..., D]."""
    values = x.astype(jnp.float32)
    inverse = lax.rsqrt(_sum(values * values) / x.shape[-1] + eps)
    return values * inverse * scale.astype(jnp.float32)


def _sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis, in an order that the batch does not change. f32[..., D] -> [..., 1].

    XLA:CPU orders a reduction differently for different batch shapes, but not a matrix product of
    one shape; so there the sum is a product with ones, a tile of rows at a time.
    """
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)

    def product(x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        sums = map_row_tiles(
            lambda tile: lax.dot_general(tile, ones, (((1,), (1,)), ((), ()))), rows
        )
        return sums.reshape(*x.shape[:-1], 1)

    return lax.platform_dependent(
        x, cpu=product, default=lambda x: jnp.sum(x, axis=-1, keepdims=True)
    )
