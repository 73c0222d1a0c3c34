"""Root-mean-square norm whose result for a row does not depend on the other rows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import cpu
from pallas_kernels.reference import map_row_tiles


@partial(jax.jit, static_argnames="eps")
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) · scale over the last axis, in float32.

    Args:
      x: bf16 or f32[..., D].
      scale: bf16 or f32[D].
      eps: added to the mean.

    Returns:
      f32[..., D].

    Raises:
      ValueError: the shapes or a dtype do not fit.
    """
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"scale must have the shape of x's last axis {x.shape}, got {scale.shape}")
    for name, array in (("x", x), ("scale", scale)):
        if array.dtype.name not in ("bfloat16", "float32"):
            raise ValueError(f"{name} must be bfloat16 or float32, got {array.dtype.name}")
    return lax.platform_dependent(
        x,
        scale,
        cpu=partial(cpu.rms_norm if cpu.available() else reference, eps=eps),
        default=partial(reference, eps=eps),
    )


def reference(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`rms_norm` in plain jnp: the definition that the C++ is tested against."""
    values = x.astype(jnp.float32)
    inverse = lax.rsqrt(_sum(values * values) / x.shape[-1] + eps)
    return values * inverse * scale.astype(jnp.float32)


def _sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis, in an order that the batch does not change. f32[..., D] -> [..., 1].

    XLA:CPU orders a reduction differently for different batch shapes, but not a matrix product of
    one shape; so there the sum is a product with ones, a tile of rows at a time. With two columns
    of ones, because one would not go to the library of matrix products: it becomes code that the
    compiler may order by what surrounds it.
    """
    ones = jnp.ones((2, x.shape[-1]), jnp.float32)

    def product(x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        sums = map_row_tiles(
            lambda tile: lax.dot_general(tile, ones, (((1,), (1,)), ((), ()))), rows
        )
        return sums[:, :1].reshape(*x.shape[:-1], 1)

    return lax.platform_dependent(
        x, cpu=product, default=lambda x: jnp.sum(x, axis=-1, keepdims=True)
    )
