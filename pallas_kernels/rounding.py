"""Rounding that a compiler keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def check_float(name: str, dtype: jnp.dtype) -> None:
    """Raises ValueError unless activations may have the type."""
    if jnp.dtype(dtype).name not in ("bfloat16", "float32"):
        raise ValueError(f"{name} must be bfloat16 or float32, got {jnp.dtype(dtype).name}")


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 -> `dtype`, the values rounded once and for all.

    XLA may drop a plain conversion to bfloat16 and back in one program and keep it in another;
    `reduce_precision` it never drops.
    """
    if dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)
