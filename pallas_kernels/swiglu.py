"""The gate of SwiGLU: silu(gate) · up."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import cpu
from pallas_kernels.platforms import by_platform, deferred
from pallas_kernels.rounding import check_float, round_to
from pallas_kernels.settings import own_settings


@partial(jax.jit, static_argnames="dtype")
@own_settings()
def swiglu(
    gate: Float32[Array, "*rows F"], up: Float32[Array, "*rows F"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "*rows F"]:
    """Computes gate · sigmoid(gate) · up in float32 and rounds the result to `dtype`.

    On CPUs it runs in the C++ library, because XLA's exponential depends on the processor; on GPUs
    in a kernel, with the bits that it has in `gpu_layers`.

    Args:
      gate: f32[..., F].
      up: f32[..., F].
      dtype: the result's dtype, bfloat16 or float32.

    Returns:
      `dtype`[..., F].

    Raises:
      ValueError: the shapes do not match, or a dtype is not accepted.
    """
    for name, given in (("gate", gate), ("up", up)):
        if given.dtype != jnp.float32 or given.shape != gate.shape:
            raise ValueError(
                f"gate and up must be float32 of one shape {list(gate.shape)}, "
                f"got {name} {given.dtype.name}{list(given.shape)}"
            )
    check_float("dtype", dtype)
    y: jax.Array = by_platform(
        gate,
        up,
        result=jax.ShapeDtypeStruct(gate.shape, dtype),
        default=partial(reference, dtype=dtype),
        cpu=partial(cpu.swiglu if cpu.available() else reference, dtype=dtype),
        cuda=partial(deferred("triton_gpu", "swiglu"), dtype=dtype),
    )
    return y


def reference(gate: jax.Array, up: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Computes `swiglu` in plain jnp. The C++ library is tested against it."""
    return round_to(jax.nn.silu(gate) * up, dtype)
