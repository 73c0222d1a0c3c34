"""The float dtypes of activations, and rounding that compilers do not remove."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def check_float(name: str, dtype: DTypeLike) -> None:
    """Raises ValueError unless `dtype` is bfloat16 or float32."""
    if jnp.dtype(dtype).name not in ("bfloat16", "float32"):
        raise ValueError(f"{name} must be bfloat16 or float32, got {jnp.dtype(dtype).name}")


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds f32[...] to `dtype`, alike in every program.

    XLA may drop a plain conversion to bfloat16 and back in one program and keep it in another. It
    never drops `reduce_precision`.
    """
    if jnp.dtype(dtype) == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def rounded_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes x · y: f32[...], rounded before any addition, alike in every program.

    A compiler may fuse a product with an addition and round once. It does not fuse through a
    selection.
    """
    product = x * y
    return jnp.where(product == product, product, jnp.nan)
