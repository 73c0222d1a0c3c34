"""Round to nearest: the 4-bit quantization that needs no data.

Every group of weights gets the scale that maps its largest magnitude to 7. The range is -7 … 7
although the format reaches -8: with this scale -8 would never be the nearest integer, and a
symmetric range treats w and -w alike.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Int4Weight, check_group_size, int4_from_integers
from pallas_kernels.rounding import round_to

LIMIT = 7


@functools.partial(jax.jit, static_argnames="group_size")
def round_to_nearest(weight: jax.Array, group_size: int | None = 128) -> Int4Weight:
    """w ≈ q · scale with scale = max |w| / 7 over the group, in bf16, and |w - q · scale| minimal.

    A group of zeros, or of values so small that their scale is zero, becomes zeros.

    Args:
      weight: bf16, f16 or f32[N, K].
      group_size: consecutive inputs that share a scale (32, 64 or 128), or None for one scale per
        output. The last group may be shorter.

    Returns:
      The quantized matrix; its scales are bf16[N, groups].

    Raises:
      ValueError: the group size is not one of these.
    """
    check_group_size(group_size)
    n, k = weight.shape
    size = k if group_size is None else group_size
    padded = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, -k % size)))
    groups = padded.reshape(n, -1, size)
    scales = round_to(jnp.max(jnp.abs(groups), axis=-1) / LIMIT, jnp.bfloat16)
    divisor = scales.astype(jnp.float32)[..., None]  # as stored: the rounding errs on its side
    q = jnp.where(divisor > 0, jnp.round(groups / divisor), 0)
    q = jnp.clip(q, -LIMIT, LIMIT).astype(jnp.int8)
    return int4_from_integers(q.reshape(n, -1)[:, :k], scales, group_size)
