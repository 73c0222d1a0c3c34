"""Root-mean-square norm. A row's result does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import cpu
from pallas_kernels.platforms import by_platform, deferred
from pallas_kernels.rounding import check_float, round_to
from pallas_kernels.row_tiles import map_row_tiles
from pallas_kernels.settings import own_settings
from pallas_kernels.stacks import Stacked, taken, taken_shapes


@partial(jax.jit, static_argnames=("eps", "dtype"))
@own_settings()
def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"] | Stacked,
    eps: float,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*rows D"]:
    """Computes x / sqrt(mean(x²) + eps) · scale over the last axis.

    The arithmetic is float32, and the result is rounded to `dtype`.

    Args:
      x: bf16 or f32[..., D].
      scale: bf16 or f32[D], alone or in a stack.
      eps: added to the mean.
      dtype: the result's dtype, bfloat16 or float32.

    Returns:
      `dtype`[..., D].

    Raises:
      ValueError: the shapes do not match, or a dtype is not accepted.
    """
    one = taken_shapes(scale)
    if x.ndim < 1 or one.shape != x.shape[-1:]:
        raise ValueError(f"scale must have the shape of x's last axis {x.shape}, got {one.shape}")
    for name, given in (("x", x.dtype), ("scale", one.dtype), ("dtype", dtype)):
        check_float(name, given)
    y: jax.Array = by_platform(
        x,
        scale,
        result=jax.ShapeDtypeStruct(x.shape, dtype),
        default=_taken(partial(reference, eps=eps, dtype=dtype)),
        cpu=_taken(partial(cpu.rms_norm if cpu.available() else reference, eps=eps, dtype=dtype)),
        cuda=partial(deferred("triton_gpu", "rms_norm"), eps=eps, dtype=dtype),
    )
    return y


def _taken(norm: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The norm for a scale that may be in a stack."""
    return lambda x, scale: norm(x, taken(scale))


def reference(
    x: jax.Array, scale: jax.Array, eps: float, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Computes `rms_norm` in plain jnp. The kernels are tested against it."""
    values = x.astype(jnp.float32)
    inverse = lax.rsqrt(_sum(values * values) / x.shape[-1] + eps)
    return round_to(values * inverse * scale.astype(jnp.float32), dtype)


def _sum(x: jax.Array) -> jax.Array:
    """Sums over the last axis in an order that does not depend on the batch.

    f32[..., D] -> f32[..., 1]

    XLA:CPU orders a reduction differently for different batch shapes, but not a matrix product of
    fixed shape. On CPUs the sum is therefore a product with ones, one tile of rows at a time. The
    ones have two columns, because XLA calls its matrix library for two. It compiles a product with
    one column itself, in an order that may depend on the surrounding code.
    """
    ones = jnp.ones((2, x.shape[-1]), jnp.float32)

    def product(x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        sums = map_row_tiles(
            lambda tile: lax.dot_general(tile, ones, (((1,), (1,)), ((), ()))), rows
        )
        return sums[:, :1].reshape(*x.shape[:-1], 1)

    total: jax.Array = lax.platform_dependent(
        x, cpu=product, default=lambda x: jnp.sum(x, axis=-1, keepdims=True)
    )
    return total
