"""Measures this machine's bandwidth and peak with the kernels' threads (src/common/probe.cc)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.native import instruction_sets

ARITHMETICS = ("integer", "bfloat16", "float32")  # in the order of src/common/types.h
_SECONDS = jax.ShapeDtypeStruct((), jnp.float32)


def read_bandwidth(data: jax.Array) -> float:
    """Bytes per second of one pass over data: uint8[n], which should exceed the caches."""
    assert instruction_sets()
    seconds = jax.jit(lambda x: jax.ffi.ffi_call("specjax_probe_read", _SECONDS)(x))(data)
    return data.size / float(seconds)


def peak(arithmetic: str, count: int = 512) -> float:
    """Operations per second without memory reads. A multiplication and an addition count as two.

    Args:
      arithmetic: "integer" (int8 products), "bfloat16" or "float32".
      count: the amount of work, in units of about ten microseconds.
    """
    assert instruction_sets()
    call = jax.ffi.ffi_call("specjax_probe_multiply", (_SECONDS, _SECONDS))
    index = np.int64(ARITHMETICS.index(arithmetic))
    seconds, operations = jax.jit(lambda: call(arithmetic=index, count=np.int64(count)))()
    return float(operations) / float(seconds)
