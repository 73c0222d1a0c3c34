"""Attention of new tokens over a KV cache that already holds them: picks the implementation.

Every implementation runs a softmax over blocks of cache slots that begin at fixed slots. The cost
follows the context in use. A row's result depends neither on its neighbours nor on how many tokens
share the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels import attention_reference, cpu
from pallas_kernels.attention_reference import BLOCK as BLOCK
from pallas_kernels.cache_entries import Entries, QuantizedEntries
from pallas_kernels.platforms import by_platform, deferred
from pallas_kernels.settings import own_settings


def _masked(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Passes the tree to a kernel as a mask: mask[b, t, j] is True if token t sees new token j."""

    def attention(
        queries: jax.Array, keys: Entries, values: Entries, lengths: jax.Array,
        positions: jax.Array, ancestors: jax.Array | None, layer: jax.Array, **options: object,
    ) -> jax.Array:  # fmt: skip
        mask = None
        if ancestors is not None:
            mask = jnp.any(ancestors[..., None] == jnp.arange(ancestors.shape[1]), axis=2)
        return kernel(queries, keys, values, lengths, positions, mask, layer, **options)

    return attention


MOST_SINKS = 64
Implementation = Literal["reference", "cpu", "triton_gpu", "mosaic_tpu"]
IMPLEMENTATIONS: dict[Implementation, Callable[..., jax.Array]] = {
    "reference": attention_reference.attention,
    "cpu": cpu.attention,
    "triton_gpu": _masked(deferred("triton_gpu", "attention")),
    "mosaic_tpu": _masked(deferred("mosaic_tpu", "attention")),
}


@partial(jax.jit, static_argnames=("window", "sinks", "head_scale", "implementation"))
@own_settings()
def attention(
    queries: Float[Array, "B T H E"],
    keys: Float32[Array, "R *L S K E"] | UInt16[Array, "R *L S K E"] | QuantizedEntries,
    values: Float32[Array, "R *L S K E"] | UInt16[Array, "R *L S K E"] | QuantizedEntries,
    lengths: Int32[Array, " B"],
    positions: Int32[Array, "B T"],
    ancestors: Int32[Array, "B T depth"] | None,
    layer: Int32[Array, ""] | int | None = None,
    *,
    window: int | None,
    sinks: int = 0,
    head_scale: float,
    implementation: Implementation | None = None,
) -> Float32[Array, "B T H E"]:
    """Softmax attention of T new tokens per row, in float32.

    A token sees every slot below its row's length (the context). New tokens are in the slots
    length … length + T - 1, and a token sees those on the path to it. With a
    window, a token sees the last `window` positions, and positions 0 … sinks - 1 (attention sinks,
    StreamingLLM).

    On CPUs a tree's token gets the same bits as at the end of its path alone. Accelerator kernels
    sum over a path at its places in the cache, which may round differently.

    Args:
      queries: bf16 or f32[B, T, H, E].
      keys: [R, L, S, K, E] in any form of `Entries`, the entries of L layers, S a multiple of
        BLOCK; [R, S, K, E] without `layer`. The new tokens' entries are in place. There may be more
        than B rows: the tokens are those of the first ones.
      values: as the keys.
      lengths: int32[B], slots of context per row, without the new tokens.
      positions: int32[B, T], positions of the new tokens. A context slot's position is its number.
      ancestors: None for a chain, whose positions are length … length + T - 1. For a tree,
        int32[B, T, depth]: the new tokens on the path to each token, ascending, the token itself
        last, padded with -1.
      layer: the layer whose entries are read, int32[] in 0 … L - 1.
      window: visible positions; None for all.
      sinks: the first positions, which every token sees, 0 … MOST_SINKS. They change nothing
        without a window.
      head_scale: multiplies the scores.
      implementation: one of `IMPLEMENTATIONS`; None chooses the best for the platform.

    Returns:
      f32[B, T, H, E].

    Raises:
      ValueError: the implementation is unknown or does not serve these operands, or sinks are out
      of their range.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if not 0 <= sinks <= MOST_SINKS:
        raise ValueError(f"sinks must be 0 … {MOST_SINKS}, got {sinks}")
    if layer is None:
        keys, values = jax.tree.map(lambda part: part[:, None], (keys, values))
    number = jnp.asarray(0 if layer is None else layer, jnp.int32)
    options = {"window": window, "sinks": sinks, "head_scale": head_scale}
    operands = (queries, keys, values, lengths, positions, ancestors, number)
    if implementation is not None:
        return IMPLEMENTATIONS[implementation](*operands, **options)
    kernels = {"cuda": _served("triton_gpu"), "tpu": _served("mosaic_tpu")}
    if cpu.available():
        kernels["cpu"] = IMPLEMENTATIONS["cpu"]
    y: jax.Array = by_platform(
        *operands,
        result=jax.ShapeDtypeStruct(queries.shape, jnp.float32),
        default=partial(IMPLEMENTATIONS["reference"], **options),
        **{platform: partial(kernel, **options) for platform, kernel in kernels.items()},
    )
    return y


def _served(name: Literal["triton_gpu", "mosaic_tpu"]) -> Callable[..., jax.Array]:
    """The kernel if it serves the operands, else the reference."""

    def attention(
        queries: jax.Array, keys: Entries, values: Entries, lengths: jax.Array,
        positions: jax.Array, ancestors: jax.Array | None, layer: jax.Array, **options: object,
    ) -> jax.Array:  # fmt: skip
        refusal = deferred(name, "attention_refusal")(queries, keys, ancestors)
        kernel = IMPLEMENTATIONS[name if refusal is None else "reference"]
        return kernel(queries, keys, values, lengths, positions, ancestors, layer, **options)

    return attention
