"""Attention of new tokens over a KV cache that already holds them: picks the implementation.

All of them run a softmax over blocks of cache slots, each at its own number, so that the cost
follows the context in use and a row's result depends neither on its neighbours nor on how many
tokens share the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import attention_reference, cpu, mosaic_tpu, triton_gpu
from pallas_kernels.attention_reference import BLOCK as BLOCK
from pallas_kernels.cache_entries import Entries


def _masked(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A kernel that takes a tree as a mask, mask[b, t, j]: token t sees new token j."""

    def attention(*operands: jax.Array, **options: object) -> jax.Array:
        *others, ancestors = operands
        mask = None
        if ancestors is not None:
            mask = jnp.any(ancestors[..., None] == jnp.arange(ancestors.shape[1]), axis=2)
        return kernel(*others, mask, **options)

    return attention


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": attention_reference.attention,
    "cpu": cpu.attention,
    "triton_gpu": _masked(triton_gpu.attention),
    "mosaic_tpu": _masked(mosaic_tpu.attention),
}


@partial(jax.jit, static_argnames=("window", "head_scale", "implementation"))
def attention(
    queries: jax.Array,
    keys: Entries,
    values: Entries,
    lengths: jax.Array,
    positions: jax.Array,
    ancestors: jax.Array | None,
    *,
    window: int | None,
    head_scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention of T new tokens per row, in float32.

    A token sees every slot below its row's length (the context) and, of the new tokens in slots
    length … length + T - 1, those on the path to it; none that is `window` or more positions back.
    On CPUs a tree's token gets the result, bit for bit, that it would get at the end of its path
    alone; the accelerators' kernels add its path up where it lies, which may round otherwise.

    Args:
      queries: [B, T, H, E].
      keys, values: [B, S, K, E], S a multiple of BLOCK, in any form of `Entries`; the new tokens'
        are in place.
      lengths: int32[B], slots of context per row, the new tokens not counted.
      positions: int32[B, T], positions of the new tokens; a context slot's position is its number.
      ancestors: int32[B, T, D], of a tree: the new tokens on the path to each, itself last, with
        rising numbers, padded with -1; None: a chain, whose positions are length … length + T - 1.
      window: visible positions, None for all.
      head_scale: factor on the scores.
      implementation: None for the platform's best, or one of `IMPLEMENTATIONS`.

    Returns:
      f32[B, T, H, E].

    Raises:
      ValueError: the implementation asked for is none, or does not serve these operands.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    kernels = _by_platform(queries, keys, ancestors)
    if implementation is not None:
        kernels = {"default": IMPLEMENTATIONS[implementation]}
    operands = (queries, keys, values, lengths, positions, ancestors)
    return lax.platform_dependent(
        *operands,
        **{
            platform: partial(kernel, window=window, head_scale=head_scale)
            for platform, kernel in kernels.items()
        },
    )


def _by_platform(
    queries: jax.Array, keys: Entries, ancestors: jax.Array | None
) -> dict[str, Callable[..., jax.Array]]:
    """Every platform's kernel, if it serves these operands; the reference serves the rest."""
    kernels = {"default": IMPLEMENTATIONS["reference"]}
    if cpu.available():
        kernels["cpu"] = IMPLEMENTATIONS["cpu"]
    if triton_gpu.attention_refusal(queries, keys, ancestors) is None:
        kernels["cuda"] = IMPLEMENTATIONS["triton_gpu"]
    if mosaic_tpu.attention_refusal(queries, keys, ancestors) is None:
        kernels["tpu"] = IMPLEMENTATIONS["mosaic_tpu"]
    return kernels
