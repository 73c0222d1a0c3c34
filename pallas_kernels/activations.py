"""Dynamic quantization of activations: the low-precision half of W4A8 and W4A4.

Each scale comes from the values that it scales (QSpec section 4.1, after Atom). A token has one
scale per group of inputs, or a single one if the weight has one scale per channel. Values round to
nearest, ties to even.

8-bit weights, and on some processors 4-bit ones, also read bfloat16 activations precisely as
integers: those of 16 bits (`split_activations`).
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

Activation = Literal["a16", "a8", "a4"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
LEVELS = {"a8": 127, "a4": 7}  # largest magnitude of the symmetric integer grid
SPLIT_LEVELS = 127 * 256 + 127  # of two signed bytes


def check_activation(activation: str) -> None:
    """Raises ValueError unless `activation` is "a16", "a8" or "a4"."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def quantize_activations(
    x: Float32[Array, "M K"], activation: Activation, group_size: int | None
) -> tuple[Int8[Array, "M K"], Float32[Array, "M G"]]:
    """Rounds each group of inputs to a symmetric integer grid: x ≈ q · scale.

    Args:
      x: f32[M, K], K a multiple of `group_size`.
      activation: "a8" (q in -127 … 127) or "a4" (q in -7 … 7).
      group_size: inputs per scale; None for one scale per token.

    Returns:
      q: int8[M, K], and scales: f32[M, G]. The scale is zero for a group of zeros and for a group
      whose scale would be subnormal in float32.
    """
    m, k = x.shape
    groups = x.reshape(m, -1, group_size or k)
    # Explicit reciprocals, because XLA replaces only some divisions by them.
    scales = jnp.max(jnp.abs(groups), axis=-1) * (1 / LEVELS[activation])
    scales = jnp.where(scales < np.finfo(np.float32).tiny, 0, scales)
    inverse = jnp.where(scales == 0, 0, 1 / jnp.where(scales == 0, 1, scales))
    q = jnp.round(groups * inverse[:, :, None]).astype(jnp.int8)
    return q.reshape(m, k), scales


def split_activations(
    x: Float32[Array, "M K"], group_size: int
) -> tuple[Int8[Array, "M K"], Int8[Array, "M K"], Float32[Array, "M G"]]:
    """Rounds each group to integers of 16 bits, in two bytes: x ≈ (256 · high + low) · scale.

    The scale is the smallest power of two with which the integers stay within SPLIT_LEVELS. A
    bfloat16 has eight significant bits, so one that is at least 1/64 of its group's largest
    magnitude is held exactly. Others are off by at most 2^-15 of that magnitude.

    Args:
      x: f32[M, K], K a multiple of `group_size`.
      group_size: inputs per scale.

    Returns:
      high, low: int8[M, K], and scales: f32[M, G]. The scale is zero for a group of zeros and for a
      group whose scale would be subnormal in float32.
    """
    m, k = x.shape
    groups = x.reshape(m, -1, group_size)
    scales = _power_above(jnp.max(jnp.abs(groups), axis=-1) * np.float32(1 / SPLIT_LEVELS))
    scales = jnp.where(scales < np.finfo(np.float32).tiny, 0, scales)
    inverse = jnp.where(scales == 0, 0, 1 / jnp.where(scales == 0, 1, scales))
    q = jnp.round(groups * inverse[:, :, None]).astype(jnp.int32).reshape(m, k)
    high = (q + 128) >> 8
    return high.astype(jnp.int8), (q - 256 * high).astype(jnp.int8), scales


def _power_above(values: jax.Array) -> jax.Array:
    """The smallest power of two, or zero, that is not below each value: f32[...]. NaNs stay."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    powers = lax.bitcast_convert_type((bits + 0x7FFFFF) >> 23 << 23, jnp.float32)
    return jnp.where(values == values, powers, values)


def clip_activations(
    x: Float[Array, "M K"], group_size: int | None, ratio: float
) -> Float32[Array, "M K"]:
    """Clips every value at `ratio` times the largest magnitude of its group (Atom, section 4.2).

    `quantize_activations` then derives its scale from that limit, which the clipped values reach.

    Args:
      x: bf16 or f32[M, K].
      group_size: inputs per group (fewer in the last); None for one group per token.
      ratio: above 0, at most 1.

    Returns:
      f32[M, K].
    """
    m, k = x.shape
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -k % (group_size or k))))
    groups = padded.reshape(m, -1, group_size or k)
    limits = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) * ratio
    return jnp.clip(groups, -limits, limits).reshape(m, -1)[:, :k]
