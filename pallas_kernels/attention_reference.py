"""Attention over the KV cache in plain jnp: what every kernel of it is tested against.

Flash attention's running softmax over blocks of BLOCK slots: the cost follows the context in use,
not the cache's capacity, and the order of every sum is fixed by the slots' own numbers. Blocks that
a token cannot see change nothing, bit for bit, so a row's result depends neither on its neighbours
nor on how many tokens share the call. Queries go in tiles of a fixed size for the same reason
(`pallas_kernels.reference`).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_entries import Entries, read_block
from pallas_kernels.reference import ROW_TILE, over_tiles

BLOCK = 128  # cache slots per step of the running softmax
_MASKED = -1e30  # finite, so that a block nobody sees gives exp(0) = 1, not NaN


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
    """`pallas_kernels.attention.attention`, for S a multiple of BLOCK."""
    b, t, h, e = queries.shape
    tiles = -(-t // ROW_TILE)
    pad = ((0, 0), (0, tiles * ROW_TILE - t))
    kv_heads = keys.shape[2]
    q = jnp.pad(queries.astype(jnp.float32) * head_scale, (*pad, (0, 0), (0, 0)))
    q = q.reshape(b * tiles, ROW_TILE, kv_heads, h // kv_heads, e).transpose(0, 2, 1, 3, 4)
    q = q.reshape(b * tiles, kv_heads, ROW_TILE * (h // kv_heads), e)
    rows = jnp.repeat(jnp.arange(b), tiles)
    indices = jnp.tile(jnp.arange(tiles * ROW_TILE).reshape(tiles, ROW_TILE), (b, 1))

    def attend_tile(tile: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, row, token = tile
        visible = partial(
            _visible, token, lengths[row], positions[row],
            None if mask is None else mask[row], window,
        )  # fmt: skip
        return _attend(queries, keys, values, row, lengths[row] + t, visible)

    out = over_tiles(attend_tile, (q, rows, indices))
    out = out.reshape(b * tiles, kv_heads, ROW_TILE, h // kv_heads, e).transpose(0, 2, 1, 3, 4)
    return out.reshape(b, tiles * ROW_TILE, h, e)[:, :t]


def _visible(
    token: jax.Array,
    length: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
    window: int | None,
    slots: jax.Array,
) -> jax.Array:
    """Which slots the tile's tokens see. token: int32[ROW_TILE], slots: int32[BLOCK]."""
    t = positions.shape[0]
    new = slots - length  # index among the new tokens; negative for context
    inside, clipped = new < t, jnp.clip(new, 0, t - 1)
    token_row = jnp.minimum(token, t - 1)
    if mask is None:
        seen = new[None, :] <= token[:, None]
    else:
        seen = (new < 0)[None, :] | mask[token_row[:, None], clipped[None, :]]
    if window is not None:
        slot_positions = jnp.where(new < 0, slots, positions[clipped])
        seen &= positions[token_row][:, None] - slot_positions[None, :] < window
    return seen & inside[None, :]


def _attend(queries, keys, values, row, used, visible):
    """One tile. queries: f32[K, R, E], R = ROW_TILE · H / K; `used` slots hold entries."""
    kv_heads, r, e = queries.shape
    per_head = r // ROW_TILE

    def block(i, carry):
        maximum, total, acc = carry
        k, v = (read_block(entries, row, i * BLOCK, BLOCK) for entries in (keys, values))
        scores = lax.dot_general(queries, k, (((2,), (2,)), ((0,), (1,))), precision="highest")
        seen = jnp.repeat(visible(i * BLOCK + jnp.arange(BLOCK)), per_head, axis=0)[None]
        scores = jnp.where(seen, scores, _MASKED)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_maximum[:, :, None]), 0)
        keep = jnp.exp(maximum - new_maximum)
        mixed = lax.dot_general(weights, v, (((2,), (0,)), ((0,), (1,))), precision="highest")
        return (
            new_maximum,
            total * keep + jnp.sum(weights, axis=-1),
            acc * keep[:, :, None] + mixed,
        )

    start = (
        jnp.full((kv_heads, r), _MASKED),
        jnp.zeros((kv_heads, r)),
        jnp.zeros((kv_heads, r, e)),
    )
    blocks = jnp.minimum(-(-used // BLOCK), keys.shape[1] // BLOCK)
    _, total, acc = lax.fori_loop(0, blocks, block, start)
    return acc / jnp.where(total == 0, 1, total)[:, :, None]
