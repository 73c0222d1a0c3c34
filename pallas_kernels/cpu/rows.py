"""Norms, rotary embeddings and SwiGLU on CPUs, by the C++ library (src/rows/rows.cc)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.cpu.native import check_available


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Computes `pallas_kernels.norms.rms_norm`, with the same bits on every processor.

    Raises:
      ValueError: the library was not built.
    """
    return _call("rms_norm", dtype, x, scale, eps=np.float32(eps))


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Computes `pallas_kernels.rope.rotate`, with the same bits on every processor.

    Raises:
      ValueError: the library was not built.
    """
    return _call("rotate", dtype, x, cos, sin)


def swiglu(gate: jax.Array, up: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Computes `pallas_kernels.swiglu.swiglu`, with the same bits on every processor.

    Raises:
      ValueError: the library was not built.
    """
    return _call("swiglu", dtype, gate, up)


def _call(
    name: str, dtype: DTypeLike, x: jax.Array, *others: jax.Array, **options: np.float32
) -> jax.Array:
    """Calls a handler whose result has x's shape."""
    check_available(name, None)
    result = jax.ShapeDtypeStruct(x.shape, dtype)
    call = jax.ffi.ffi_call(f"specjax_{name}", result, vmap_method="broadcast_all")
    y: jax.Array = call(x, *others, **options)
    return y
