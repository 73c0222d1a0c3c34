"""MXFP4 by direct cast (OCP Microscaling v1.0, section 6.3): no data, no search.

32 consecutive inputs share a power of two, which follows from their largest magnitude. Each weight
becomes that power times the nearest E2M1 value, one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign.
Ties go to the even code, and values above 6 become 6. The power is 2^(floor(log2 of the largest) -
2), so the largest value lies in 4 … 8 and may be clipped to 6. "even" doubles the power where
clipping would exceed the rounding error, for largest values of 7 and more (mantissa 1.75), as the
library compressed-tensors does.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from checkpoints_tools.quantization.rows import over_rows
from pallas_kernels.formats import MXFP4_GROUP, Mxfp4Weight, mxfp4_from_codes

ROUNDINGS = ("floor", "even")
# Midpoints of neighbouring values. A tie goes to the even code: up from an odd code, else down.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_LARGEST_EXPONENT = 2  # of E2M1: 4 = 2^2
_LARGEST_SCALE = 252  # E8M0: 6 times a larger scale would overflow float32
_NAN = 255  # the E8M0 code of NaN


def cast_to_mxfp4(weight: Float[Array, "N K"], rounding: str = "floor") -> Mxfp4Weight:
    """w ≈ e2m1 · 2^(scale - 127).

    A group of zeros becomes zeros. A group that holds NaN or infinity becomes NaN as a whole.

    Args:
      weight: bf16, f16 or f32[N, K]. The last group may be shorter.
      rounding: how a group's power of two is rounded: "floor" (OCP) or "even".

    Returns:
      The quantized matrix.

    Raises:
      ValueError: `rounding` is neither of these.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    cast: Mxfp4Weight = over_rows(lambda rows: _cast(rows, rounding), weight)
    return cast


@functools.partial(jax.jit, static_argnames="rounding")
def _cast(weight: jax.Array, rounding: str) -> Mxfp4Weight:
    n, k = weight.shape
    padded = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, -k % MXFP4_GROUP)))
    groups = padded.reshape(n, -1, MXFP4_GROUP)
    scales = _scales(jnp.max(jnp.abs(groups), axis=-1), rounding)
    values = groups * _power_of_two(127 - scales)[..., None]
    return mxfp4_from_codes(_codes(values).reshape(n, -1)[:, :k], scales.astype(jnp.uint8))


def _scales(largest: jax.Array, rounding: str) -> jax.Array:
    """The E8M0 codes of groups by their largest magnitudes: int32, 255 if not finite."""
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    if rounding == "even":
        bits += 1 << 21  # a quarter of the mantissa's range: mantissas of 1.75 and more carry over
    codes = jnp.clip((bits >> 23) - _LARGEST_EXPONENT, 0, _LARGEST_SCALE)
    return jnp.where(jnp.isfinite(largest), codes, _NAN)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent, built from its bits. The exponent must be in -126 … 127 (normal float32)."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _codes(values: jax.Array) -> jax.Array:
    """The E2M1 codes nearest to `values`: uint8 in 0 … 15; the highest bit is the sign."""
    magnitudes = jnp.abs(values)
    passed = (
        magnitudes >= point if code % 2 else magnitudes > point
        for code, point in enumerate(_MIDPOINTS)
    )
    codes = sum(above.astype(jnp.uint8) for above in passed)
    return jnp.where(jnp.signbit(values), codes + 8, codes).astype(jnp.uint8)
