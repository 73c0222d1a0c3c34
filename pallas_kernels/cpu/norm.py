"""The root-mean-square norm on CPUs, by the C++ library (src/norm.cc)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.native import check_available


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`pallas_kernels.norms.rms_norm`; the same bits on every processor.

    Raises:
      ValueError: the library was not built.
    """
    check_available("rms_norm", None)
    y = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = jax.ffi.ffi_call("specjax_rms_norm", y, vmap_method="broadcast_all")
    return call(x, scale, eps=np.float32(eps))
