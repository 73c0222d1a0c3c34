"""Rounding that a compiler keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 -> `dtype`, the values rounded once and for all.

    XLA may drop a plain conversion to bfloat16 and back in one program and keep it in another;
    `reduce_precision` it never drops.
    """
    if dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)
