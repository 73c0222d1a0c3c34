"""Operands, visible slots and the softmax that the accelerators' attention kernels share.

A kernel works on the query rows of one key-value head. Row t · (H / K) + g is the head's g-th query
of token t. All heads of a token see the same slots. Two numbers describe them, the first slot and
the end; a tree adds a word per 32 new tokens, with one bit each.

The running softmax is that of `pallas_kernels.attention_reference`, with powers of 2. Blocks that a
row does not see leave its state unchanged, bit for bit: its sums are multiplied by one, and zeros
are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_reference import BLOCK

# The greatest score so far, f32[R, 1]; the sum of the weights, f32[R, 1]; the weighted sums of the
# values, in as many parts f32[R, width] as the kernel likes.
State = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]

_UNSEEN = -1e30  # finite: a block that no token sees gives exp2(0) = 1, not NaN
_WORD_BITS = 5  # a word holds the visibility of 2^5 new tokens
_WORD = 1 << _WORD_BITS
MOST_MASKED = 8 * _WORD  # new tokens under a mask; every block tests every word


def mask_refusal(queries: jax.Array, mask: jax.Array | None) -> str | None:
    """Returns why accelerator kernels do not serve this mask; None if they do."""
    if mask is not None and queries.shape[1] > MOST_MASKED:
        return f"a mask must have at most {MOST_MASKED} new tokens, got {queries.shape[1]}"
    return None


def by_kv_head(queries: jax.Array, kv_heads: int, tile: int) -> jax.Array:
    """[B, T, H, E] -> [B, K, R, E], R rows in whole tiles, padded with zeros."""
    b, t, h, e = queries.shape
    rows = queries.reshape(b, t, kv_heads, h // kv_heads, e).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(b, kv_heads, t * h // kv_heads, e)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % tile), (0, 0)))


def by_token(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverts `by_kv_head`: [B, K, R, E] -> [B, T, H, E], which is `shape`."""
    b, t, h, e = shape
    kv_heads = rows.shape[1]
    rows = rows[:, :, : t * h // kv_heads].reshape(b, kv_heads, t, h // kv_heads, e)
    return rows.transpose(0, 2, 1, 3, 4).reshape(shape)


def limits(
    lengths: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
    window: int | None,
    sinks: int,
    *,
    rows_per_token: int,
    tile: int,
    slots: int,
) -> tuple[jax.Array, jax.Array]:
    """The slots that each query row sees, and the blocks that each tile of rows must read.

    Returns:
      int32[B, R, 2 + words]: the first slot that a row sees and the end, then, with a mask, the
        words of the new tokens that it sees.
      int32[B, R / tile, 2]: the first block and the end. Padding rows copy the last row.
    """
    b, t = positions.shape
    context = jnp.broadcast_to(lengths[:, None], (b, t))
    first = jnp.zeros_like(context)
    if window is not None:
        first = jnp.maximum(positions - window + 1, 0)
    if mask is None:
        end = read = context + jnp.arange(1, t + 1)
        words = []
    else:
        end, read = context, context + t
        words = _words(_within(mask, positions, window, sinks))

    def by_row(column: jax.Array) -> jax.Array:
        column = jnp.repeat(column, rows_per_token, axis=1)
        return jnp.pad(column, ((0, 0), (0, -column.shape[1] % tile)), mode="edge")

    columns = jnp.stack([by_row(column) for column in (first, end, *words)], axis=-1)
    first_block = by_row(first).reshape(b, -1, tile).min(axis=2) // BLOCK
    end_block = -(-by_row(read).reshape(b, -1, tile).max(axis=2) // BLOCK)
    blocks = jnp.stack((first_block, end_block), axis=-1)
    return columns, jnp.clip(blocks, 0, slots // BLOCK)


def chain_limits(
    length: jax.Array, tile: jax.Array, *, rows: int, rows_per_token: int, window: int | None
) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array]]:
    """The `limits` of one tile of a chain, computed by the kernel that reads it.

    Padding rows belong to tokens after the last, so that the number of tokens changes nothing.

    length: int32[], slots of context; tile: int32[], the tile's number; rows: its
    rows.

    Returns:
      The first slot that each row sees and the end, int32[rows, 1] each; the first block that the
      tile reads and the end, int32[] each.
    """

    def ends(row: jax.Array) -> jax.Array:
        return length + row // rows_per_token + 1

    def begins(end: jax.Array) -> jax.Array:
        return jnp.zeros_like(end) if window is None else jnp.maximum(end - window, 0)

    end = ends(tile * rows + lax.broadcasted_iota(jnp.int32, (rows, 1), 0))
    first_block = begins(ends(tile * rows)) // BLOCK
    end_block = (ends(tile * rows + rows - 1) + BLOCK - 1) // BLOCK
    return [begins(end), end], (first_block, end_block)


def _within(mask: jax.Array, positions: jax.Array, window: int | None, sinks: int) -> jax.Array:
    """Removes tokens `window` or more positions back from mask: bool[B, T, T]."""
    if window is None:
        return mask
    near = positions[:, :, None] - positions[:, None, :] < window
    return mask & (near | (positions[:, None, :] < sinks))


def _words(mask: jax.Array) -> list[jax.Array]:
    """bool[B, T, T] -> a list of int32[B, T]: bit j of word i is new token 32 i + j."""
    b, t, _ = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, -t % _WORD))).reshape(b, t, -1, _WORD)
    bits = bits.astype(jnp.uint32) << jnp.arange(_WORD, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(bits.sum(axis=-1, dtype=jnp.uint32), jnp.int32)
    return [words[:, :, i] for i in range(words.shape[2])]


def blocks_apart(first: jax.Array, sinks: int) -> jax.Array:
    """Blocks of sinks that lie before the first other block, int32[]: 1 or 0."""
    return ((first > 0) & (sinks > 0)).astype(jnp.int32)


def visible(
    columns: Sequence[jax.Array], block: jax.Array, length: jax.Array, sinks: int
) -> jax.Array:
    """Which slots of a block the rows see. columns: from `limits`, [R, 1] -> bool[R, BLOCK]."""
    first, end, *words = columns
    slots = block * BLOCK + lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)
    seen = ((slots >= first) | (slots < sinks)) & (slots < end)
    new = slots - length
    for i, word in enumerate(words):
        seen |= (new >> _WORD_BITS == i) & (word >> (new & _WORD - 1) & 1 == 1)
    return seen


def exponent_scale(head_scale: float) -> float:
    """The factor for scores such that exp2 gives what exp gives with `head_scale`."""
    return head_scale * math.log2(math.e)


def start(rows: int, widths: Sequence[int]) -> State:
    """The initial state of the softmax."""
    return (
        jnp.full((rows, 1), _UNSEEN, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        tuple(jnp.zeros((rows, width), jnp.float32) for width in widths),
    )


def add_block(
    state: State,
    scores: jax.Array,
    seen: jax.Array,
    mix: Callable[[jax.Array], Sequence[jax.Array]],
) -> State:
    """Adds one block to the state.

    Args:
      state: the state before.
      scores: f32[R, BLOCK], for exp2.
      seen: bool[R, BLOCK].
      mix: maps weights, f32[R, BLOCK], to the block's weighted sums of values, one per part.
    """
    maximum, total, sums = state
    scores = jnp.where(seen, scores, _UNSEEN)
    highest = jnp.maximum(maximum, jnp.max(scores, axis=1)[:, None])
    weights = jnp.where(seen, jnp.exp2(scores - highest), 0.0)
    keep = jnp.exp2(maximum - highest)
    return (
        highest,
        total * keep + jnp.sum(weights, axis=1)[:, None],
        tuple(old * keep + new for old, new in zip(sums, mix(weights), strict=True)),
    )


def merge(state: State, later: State) -> State:
    """Merges the states of two consecutive runs of blocks."""
    highest = jnp.maximum(state[0], later[0])
    keep, gain = jnp.exp2(state[0] - highest), jnp.exp2(later[0] - highest)
    return (
        highest,
        state[1] * keep + later[1] * gain,
        tuple(old * keep + new * gain for old, new in zip(state[2], later[2], strict=True)),
    )


def finish(state: State) -> list[jax.Array]:
    """The weighted means of the values; zeros for a row that saw nothing."""
    _, total, sums = state
    return [values / jnp.where(total == 0, 1.0, total) for values in sums]
