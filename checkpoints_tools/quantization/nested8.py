"""Rounding to 8 bits whose high nibbles are a good 4-bit weight (`nested.NestedInt8Weight`).

Both readings have the same scales. A smaller scale clips the largest weights and represents all
others more finely, in 4 bits and in 8. The search weighs both errors, each in its own steps: a clip
that helps the draft must not cost the 8-bit reading more.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from checkpoints_tools.quantization.rows import over_rows
from checkpoints_tools.quantization.rtn import (
    WEIGHT_RATIOS,
    best_scales,
    clipping_error,
    grouped,
    penalty,
)
from pallas_kernels.formats import check_group_size
from pallas_kernels.nested import NestedInt8Weight
from pallas_kernels.planes import LARGEST, SMALLEST, nested_int8_from_integers

STEPS = 16  # of the 8-bit reading, in one of the 4-bit one


def round_nested(weight: Float[Array, "N K"], group_size: int | None = 128) -> NestedInt8Weight:
    """Rounds a weight to 8 bits in two planes.

    Args:
      weight: bf16, f16 or f32[N, K].
      group_size: consecutive inputs that share a scale (32, 64 or 128), or None for one scale per
        output. The last group may be shorter.

    Returns:
      The quantized matrix; its scales are bf16[N, groups].

    Raises:
      ValueError: `group_size` is not supported.
    """
    check_group_size(group_size)
    rounded: NestedInt8Weight = over_rows(lambda rows: _round(rows, group_size), weight)
    return rounded


@functools.partial(jax.jit, static_argnames="group_size")
def _round(weight: jax.Array, group_size: int | None) -> NestedInt8Weight:
    n, k = weight.shape
    groups = grouped(weight, group_size)
    scales = best_scales(
        groups,
        4,
        WEIGHT_RATIOS,
        lambda scales: _errors(groups, scales[..., None]),
        clipping_error(groups, -SMALLEST / STEPS, STEPS),
    )
    q = _nearest(groups, scales[..., None]).reshape(n, -1)[:, :k]
    return nested_int8_from_integers(q.astype(jnp.int8), scales.astype(jnp.bfloat16), group_size)


def _errors(groups: jax.Array, scales: jax.Array) -> jax.Array:
    """Σ |error|^2.4 of both readings over every group, in steps: f32[N, G, g] -> f32[N, G]."""
    q = _nearest(groups, scales)
    coarse = groups - jnp.floor(q / STEPS + 0.5) * scales
    fine = STEPS * (groups - q * scales / STEPS)
    return jnp.sum(penalty(coarse) + penalty(fine), axis=-1)


def _nearest(values: jax.Array, scales: jax.Array) -> jax.Array:
    """The nearest integers of 8 bits, as f32; zeros where the scale is zero."""
    q = jnp.where(scales > 0, jnp.round(values * STEPS / scales), 0)
    return jnp.clip(q, SMALLEST, LARGEST)
