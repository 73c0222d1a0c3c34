"""Rotary position embedding (RoPE) with angles that are computed once per pass.

On CPUs it runs in the C++ library, because XLA:CPU would fuse sine and cosine into the code that
reads them and compute them again for every layer and head.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import cpu
from pallas_kernels.platforms import by_platform
from pallas_kernels.rounding import check_float, round_to
from pallas_kernels.settings import own_settings


@partial(jax.jit, static_argnames="dtype")
@own_settings()
def rotate(
    x: Float32[Array, "*rows H E"],
    cos: Float32[Array, "*rows E//2"],
    sin: Float32[Array, "*rows E//2"],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*rows H E"]:
    """Rotates pairs of features: entry i of a head's first half with entry i of its second half.

    The arithmetic is float32, and the result is rounded to `dtype`.

    Args:
      x: f32[..., H, E], E even.
      cos: f32[..., E / 2], the cosines of each row's angles.
      sin: f32[..., E / 2], the sines of each row's angles.
      dtype: the result's dtype, bfloat16 or float32.

    Returns:
      `dtype`[..., H, E].

    Raises:
      ValueError: the shapes do not match, or a dtype is not accepted.
    """
    if x.ndim < 2 or x.shape[-1] % 2 or x.dtype != jnp.float32:
        raise ValueError(
            f"x must be float32 [..., H, E] with an even E, got {x.dtype.name}{list(x.shape)}"
        )
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.shape != (*x.shape[:-2], x.shape[-1] // 2) or angles.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32 and match x's shape {x.shape}, "
                f"got {angles.dtype.name}{list(angles.shape)}"
            )
    check_float("dtype", dtype)
    y: jax.Array = by_platform(
        x,
        cos,
        sin,
        result=jax.ShapeDtypeStruct(x.shape, dtype),
        default=partial(reference, dtype=dtype),
        cpu=partial(cpu.rotate if cpu.available() else reference, dtype=dtype),
    )
    return y


def reference(
    x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Computes `rotate` in plain jnp. The C++ library is tested against it."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return round_to(turned, dtype)
