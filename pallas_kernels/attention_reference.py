"""Attention over the KV cache in plain jnp; every attention kernel is tested against it.

It runs flash attention's running softmax over blocks of BLOCK slots. The cost follows the context
in use, not the cache's capacity, and the slot numbers alone fix the order of every sum. Blocks that
a token cannot see change nothing, bit for bit, so a row's result depends neither on its neighbours
nor on how many tokens share the call. Queries run in tiles of a fixed size for the same reason
(`pallas_kernels.row_tiles`).

In a tree, every token reads its path as if it were in consecutive slots, with products of the
chain's shape. The blocks with new tokens are therefore read once per token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_entries import Entries, read_block, read_slots
from pallas_kernels.row_tiles import ROW_TILE, over_tiles

BLOCK = 128  # cache slots per step of the running softmax
# Per query row: the greatest score, the sum of the weights, the weighted sum of the values.
State = tuple[jax.Array, jax.Array, jax.Array]
_MASKED = -1e30  # finite: a block that no token sees gives exp(0) = 1, not NaN


def attention(
    queries: jax.Array,
    keys: Entries,
    values: Entries,
    lengths: jax.Array,
    positions: jax.Array,
    ancestors: jax.Array | None,
    layer: jax.Array,
    *,
    window: int | None,
    sinks: int = 0,
    head_scale: float,
) -> jax.Array:
    """Computes `pallas_kernels.attention.attention`. S is a multiple of BLOCK."""
    b, t, h, e = queries.shape
    tiles = -(-t // ROW_TILE)
    pad = ((0, 0), (0, tiles * ROW_TILE - t))
    kv_heads = keys.shape[3]
    q = jnp.pad(queries.astype(jnp.float32) * head_scale, (*pad, (0, 0), (0, 0)))
    q = q.reshape(b * tiles, ROW_TILE, kv_heads, h // kv_heads, e).transpose(0, 2, 1, 3, 4)
    q = q.reshape(b * tiles, kv_heads, ROW_TILE * (h // kv_heads), e)
    rows = jnp.repeat(jnp.arange(b), tiles)
    indices = jnp.tile(jnp.arange(tiles * ROW_TILE).reshape(tiles, ROW_TILE), (b, 1))

    def attend_tile(tile: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, row, token = tile
        paths = None if ancestors is None else ancestors[row, jnp.minimum(token, t - 1)]
        sight = _Sight((row, layer), token, lengths[row], positions[row], paths, window, sinks)
        return _attend(queries, keys, values, sight)

    out = over_tiles(attend_tile, (q, rows, indices))
    out = out.reshape(b * tiles, kv_heads, ROW_TILE, h // kv_heads, e).transpose(0, 2, 1, 3, 4)
    return out.reshape(b, tiles * ROW_TILE, h, e)[:, :t]


class _Sight(NamedTuple):
    """The slots that a tile of tokens in one row sees.

    place: the row and the layer, int32[] each; token: int32[ROW_TILE], the tokens' numbers;
    length: the row's context; positions: int32[T]; paths: int32[ROW_TILE, D] in a tree.
    """

    place: tuple[jax.Array, jax.Array]
    token: jax.Array
    length: jax.Array
    positions: jax.Array
    paths: jax.Array | None
    window: int | None
    sinks: int

    @property
    def used(self) -> jax.Array:
        """The number of slots in use, with a path counted as consecutive slots."""
        new = self.positions if self.paths is None else self.paths[0]
        return self.length + new.shape[0]

    def new_tokens(self, slots: jax.Array) -> jax.Array:
        """The new token in each slot, negative for none: int32[ROW_TILE, slots].

        In a chain all tokens of the tile share it: int32[1, slots].
        """
        new = slots - self.length
        if self.paths is None:
            return new[None, :]
        depth = self.paths.shape[1]
        node = self.paths[:, jnp.clip(new, 0, depth - 1)]
        return jnp.where((new >= 0) & (new < depth), node, -1)

    def visible(self, slots: jax.Array) -> jax.Array:
        """Which slots the tokens see. int32[BLOCK] -> bool[ROW_TILE, BLOCK]."""
        t = self.positions.shape[0]
        context = (slots < self.length)[None, :]
        new = self.new_tokens(slots)
        clipped = jnp.clip(new, 0, t - 1)
        seen = new <= self.token[:, None] if self.paths is None else context | (new >= 0)
        if self.window is not None:
            slot_positions = jnp.where(context, slots, self.positions[clipped])
            own = self.positions[jnp.minimum(self.token, t - 1)]
            seen &= (own[:, None] - slot_positions < self.window) | (slot_positions < self.sinks)
        return seen & (new < t)


def _attend(queries: jax.Array, keys: Entries, values: Entries, sight: _Sight) -> jax.Array:
    """Attends one tile. queries: f32[K, R, E], R = ROW_TILE · H / K."""
    kv_heads, r, e = queries.shape
    per_head = r // ROW_TILE

    def add(carry: State, k: jax.Array, v: jax.Array, slots: jax.Array) -> State:
        """Adds a block. k, v: f32[BLOCK, K, E]."""
        maximum, total, acc = carry
        scores = lax.dot_general(queries, k, (((2,), (2,)), ((0,), (1,))), precision="highest")
        seen = jnp.repeat(sight.visible(slots), per_head, axis=0)[None]
        scores = jnp.where(seen, scores, _MASKED)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_maximum[:, :, None]), 0)
        keep = jnp.exp(maximum - new_maximum)
        # 0 · NaN is NaN, so values that are not finite are kept from queries that do not see them.
        finite = jnp.all(jnp.isfinite(v), axis=-1)
        spoilt = jnp.any(seen & ~finite.T[:, None], axis=-1, keepdims=True)
        v = jnp.where(finite[:, :, None], v, 0)
        mixed = lax.dot_general(weights, v, (((2,), (0,)), ((0,), (1,))), precision="highest")
        return (
            new_maximum,
            total * keep + jnp.sum(weights, axis=-1),
            acc * keep[:, :, None] + jnp.where(spoilt, jnp.nan, mixed),
        )

    def block(i: jax.Array, carry: State) -> State:
        k, v = (read_block(entries, sight.place, i * BLOCK, BLOCK) for entries in (keys, values))
        return add(carry, k, v, i * BLOCK + jnp.arange(BLOCK))

    def block_of_paths(i: jax.Array, carry: State) -> State:
        slots = i * BLOCK + jnp.arange(BLOCK)
        new = sight.new_tokens(slots)
        places = jnp.where(new < 0, slots, sight.length + new)

        def of_token(n: jax.Array) -> list[jax.Array]:
            k, v = (read_slots(entries, sight.place, places[n]) for entries in (keys, values))
            parts = add(carry, k, v, slots)
            return [part.reshape(kv_heads, ROW_TILE, -1)[:, n] for part in parts]

        parts = lax.map(of_token, jnp.arange(ROW_TILE))
        maximum, total, acc = (
            jnp.moveaxis(part, 0, 1).reshape(old.shape)
            for part, old in zip(parts, carry, strict=True)
        )
        return maximum, total, acc

    carry: State = (
        jnp.full((kv_heads, r), _MASKED),
        jnp.zeros((kv_heads, r)),
        jnp.zeros((kv_heads, r, e)),
    )
    blocks = jnp.minimum(-(-sight.used // BLOCK), keys.shape[2] // BLOCK)
    shared = blocks if sight.paths is None else jnp.clip(sight.length // BLOCK, 0, blocks)
    carry = lax.fori_loop(0, shared, block, carry)
    if sight.paths is not None:
        carry = lax.fori_loop(shared, blocks, block_of_paths, carry)
    _, total, acc = carry
    return acc / jnp.where(total == 0, 1, total)[:, :, None]
