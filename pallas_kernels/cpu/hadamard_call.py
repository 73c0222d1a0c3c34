"""The fast Hadamard transform on CPUs, by the C++ library (src/rows/hadamard.cc)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.native import check_available


def hadamard(x: jax.Array, *matrices: jax.Array, scale: float) -> jax.Array:
    """Computes `pallas_kernels.hadamard.reference`, bit for bit.

    Raises:
      ValueError: the library was not built.
    """
    check_available("hadamard", None)
    y = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = jax.ffi.ffi_call("specjax_hadamard", y, vmap_method="expand_dims")
    return call(x, *matrices, scale=np.float32(scale))
