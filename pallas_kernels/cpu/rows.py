"""What is done to rows between matrix products, on CPUs, by the C++ library (src/rows/rows.cc)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.native import check_available


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """`pallas_kernels.norms.rms_norm`; the same bits on every processor.

    Raises:
      ValueError: the library was not built.
    """
    return _call("rms_norm", dtype, x, scale, eps=np.float32(eps))


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """`pallas_kernels.rope.rotate`; the same bits on every processor.

    Raises:
      ValueError: the library was not built.
    """
    return _call("rotate", dtype, x, cos, sin)


def _call(name: str, dtype: jnp.dtype, x: jax.Array, *others: jax.Array, **options: Any) -> Any:
    """The handler's result, of x's shape."""
    check_available(name, None)
    result = jax.ShapeDtypeStruct(x.shape, dtype)
    call = jax.ffi.ffi_call(f"specjax_{name}", result, vmap_method="broadcast_all")
    return call(x, *others, **options)
