"""Attention of new tokens over a KV cache that already holds them: picks the implementation.

All of them run a softmax over blocks of cache slots, each at its own number, so that the cost
follows the context in use and a row's result depends neither on its neighbours nor on how many
tokens share the call.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import lax

from pallas_kernels import attention_reference, cpu
from pallas_kernels.attention_reference import BLOCK as BLOCK
from pallas_kernels.cache_entries import Entries


@partial(jax.jit, static_argnames=("window", "head_scale"))
def attention(
    queries: jax.Array,
    keys: Entries,
    values: Entries,
    lengths: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
    *,
    window: int | None,
    head_scale: float,
) -> jax.Array:
    """Softmax attention of T new tokens per row, in float32.

    A token sees every slot below its row's length (the context) and, of the new tokens in slots
    length … length + T - 1, those that `mask` shows it; none that is `window` or more positions
    back.

    Args:
      queries: [B, T, H, E].
      keys, values: [B, S, K, E], S a multiple of BLOCK, in any form of `Entries`; the new tokens'
        are in place.
      lengths: int32[B], slots of context per row, the new tokens not counted.
      positions: int32[B, T], positions of the new tokens; a context slot's position is its number.
      mask: bool[B, T, T], mask[b, t, j]: token t sees new token j; None: j <= t.
      window: visible positions, None for all.
      head_scale: factor on the scores.

    Returns:
      f32[B, T, H, E].
    """
    kernels = {
        "cpu": cpu.attention if cpu.available() else attention_reference.attention,
        "default": attention_reference.attention,
    }
    operands = (queries, keys, values, lengths, positions, mask)
    return lax.platform_dependent(
        *operands,
        **{
            platform: partial(kernel, window=window, head_scale=head_scale)
            for platform, kernel in kernels.items()
        },
    )
