"""Rotary position embedding (RoPE) by angles that are computed once per pass.

On CPUs it is a call into the C++ library, because XLA:CPU fuses sine and cosine into whatever reads
them: they would be computed again for every layer and every head.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import cpu
from pallas_kernels.rounding import check_float, round_to


@partial(jax.jit, static_argnames="dtype")
def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """Every head's halves, paired, turned by the row's angles; in float32, then rounded.

    Args:
      x: f32[..., H, E], E even.
      cos, sin: f32[..., E / 2], of the angles of each row's pairs.
      dtype: of the result, bfloat16 or float32.

    Returns:
      `dtype`[..., H, E].

    Raises:
      ValueError: the shapes or a dtype do not fit.
    """
    if x.ndim < 2 or x.shape[-1] % 2 or x.dtype != jnp.float32:
        raise ValueError(
            f"x must be float32 [..., H, E] with an even E, got {x.dtype.name}{list(x.shape)}"
        )
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.shape != (*x.shape[:-2], x.shape[-1] // 2) or angles.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32 and fit x's shape {x.shape}, "
                f"got {angles.dtype.name}{list(angles.shape)}"
            )
    check_float("dtype", dtype)
    return lax.platform_dependent(
        x,
        cos,
        sin,
        cpu=partial(cpu.rotate if cpu.available() else reference, dtype=dtype),
        default=partial(reference, dtype=dtype),
    )


def reference(
    x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """`rotate` in plain jnp: the definition that the C++ is tested against."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return round_to(turned, dtype)
