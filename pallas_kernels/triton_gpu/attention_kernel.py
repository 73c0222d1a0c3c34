"""Attention of new tokens over the KV cache, for NVIDIA GPUs from Ampere on.

Two Pallas kernels, compiled by Pallas's Triton backend. The first reads the stored cache. Each of
its programs serves ROW_TILE query rows of one batch row and key-value head, and runs the softmax
over one segment of the slots, in slot order. The second kernel merges a tile's segments in order.
With segments, the context of one row occupies all multiprocessors. Programs return at once for
segments that their rows do not see, so the cost follows the context in use, or the window. A cache
of one segment takes one kernel; to merge one state changes no bit.

`pallas_kernels.attention_reference` defines the result. Rounding differs in two places: softmax
weights are rounded to bfloat16 for the tensor cores (their sum is not), and a quantized slot's
scale multiplies its score and its weight, because code - zero is exact in bfloat16. Products are
summed in float32.

Summation order: blocks in slot order within a segment, then segments; one product of ROW_TILE rows
per block. Segments and blocks begin at fixed slots, and T sets only the number of tiles, so a row's
bits depend neither on T nor on its neighbours. This relies on tensor cores treating the rows of a
product alike, which `benchmarks/gpu_check.py` confirms on an H100. The program for a mask computes
visibility differently, and the compiler could reorder its float operations.

Not implemented: float32, whose products spill registers; heads whose width is not a power of two;
tuned tiles and segments. A long prompt reads the cache once per ROW_TILE of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import attention_operands as shared
from pallas_kernels.attention_reference import BLOCK
from pallas_kernels.cache_entries import Entries, QuantizedEntries
from pallas_kernels.triton_gpu.attention_output import ROW_TILE, Output, tile_rows
from pallas_kernels.triton_gpu.readings import Reading
from pallas_kernels.triton_gpu.segments import whole

SEGMENT = 4  # blocks per program
PIPELINED_BYTES = 2**16  # a block's keys and values, which fit every GPU's shared memory
NARROWEST, WIDEST = 16, 256  # features: the narrowest product, the widest head in registers
_LAST, _FIRST = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))  # the right axis to contract


def attention_refusal(queries: jax.Array, keys: Entries, mask: jax.Array | None) -> str | None:
    """Returns why `attention` does not serve these operands; None if it does."""
    stored = "codes" if isinstance(keys, QuantizedEntries) else keys.dtype.name
    if queries.dtype != jnp.bfloat16 or stored not in ("codes", "uint16"):
        return (
            "queries must be bfloat16 and the cache of bfloat16 bits or codes, "
            f"got {queries.dtype.name} and {stored}"
        )
    width = _plane_width(queries.shape[3], keys)
    if width < NARROWEST or queries.shape[3] > WIDEST or width & width - 1:
        return (
            f"head_dim must be a power of two up to {WIDEST}, {NARROWEST} or more in a product, "
            f"got {queries.shape[3]}, {width} in a product"
        )
    if isinstance(keys, QuantizedEntries) and 2**31 < keys.codes.size <= 2**32:
        return f"codes of more than 2^31 bytes are out of reach, got {keys.codes.size}"
    return shared.mask_refusal(queries, mask)


def _plane_width(features: int, keys: Entries) -> int:
    """Features that are decoded together. 4-bit codes pack the two halves of a head in a byte."""
    return features // 2 if isinstance(keys, QuantizedEntries) and keys.bits == 4 else features


def attention(
    queries: jax.Array,
    keys: Entries,
    values: Entries,
    lengths: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
    layer: jax.Array,
    *,
    window: int | None,
    sinks: int = 0,
    head_scale: float,
    reading: Reading | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `pallas_kernels.attention.attention` for bfloat16, heads of 16, 32, … 256 features.

    Args:
      reading: a product's, in 16 bits and of H · E inputs; or None.
      interpret: runs the kernels as ordinary XLA operations, on any platform.

    Returns:
      f32[B, T, H, E]; or bf16[rows, H · E] as `reading` says, where rows behind B · T have any
      values.

    Raises:
      ValueError: `attention_refusal` returns a reason.
    """
    reason = attention_refusal(queries, keys, mask)
    if reason is not None:
        raise ValueError(reason)
    slots, kv_heads = keys.shape[2:4]
    per_token = queries.shape[2] // kv_heads
    tiles = partial(
        shared.chain_limits,
        rows=ROW_TILE, rows_per_token=per_token, window=window,
    )  # fmt: skip
    shown: list[jax.Array] = []
    if mask is not None:
        shown += shared.limits(
            lengths, positions, mask, window, sinks,
            rows_per_token=per_token, tile=ROW_TILE, slots=slots,
        )  # fmt: skip
    sinks = 0 if window is None else sinks
    visible = partial(_visible, tiles, slots // BLOCK)
    output = Output(queries.shape, per_token, reading)
    states = _segments(
        queries, shown, lengths, layer, keys, values, visible, sinks, head_scale, output, interpret
    )
    mixed = states[0]
    if len(states) > 1:
        mixed = _merged(shown, lengths, states, visible, sinks, output, interpret)
    return mixed if reading else mixed.reshape(queries.shape)


def _visible(
    tiles: Callable[..., Any], end: int, shown: Sequence[jax.Ref], length: jax.Array, n: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns a tile's columns as in `shared.visible`, the first block that it reads and the end.

    shown: `shared.limits` of the tile, or nothing for a chain; n: the tile's number.
    """
    if not shown:
        columns, blocks = tiles(length, n)
        return columns, *(jnp.minimum(each, end) for each in blocks)
    limits, read = shown
    columns = [limits[:, pl.ds(i, 1)] for i in range(limits.shape[1])]
    return columns, read[0], read[1]


def _of_tile(shown: Sequence[jax.Array]) -> list[pl.BlockSpec]:
    """How programs (row, head, tile, …) read `shared.limits`."""
    if not shown:
        return []
    return [
        pl.BlockSpec((None, ROW_TILE, shown[0].shape[2]), lambda i, j, n, *_: (i, n, 0)),
        pl.BlockSpec((None, None, 2), lambda i, j, n, *_: (i, n, 0)),
    ]


def _segments(
    queries: jax.Array,
    shown: Sequence[jax.Array],
    lengths: jax.Array,
    layer: jax.Array,
    keys: Entries,
    values: Entries,
    visible: Callable[..., Any],
    sinks: int,
    head_scale: float,
    output: Output,
    interpret: bool,
) -> list[jax.Array]:
    """Computes each segment's state: f32[B, K, segments, R] twice, f32[B, K, segments, R, E].

    A single segment gives the result alone: `output.shape`.
    """
    b, t, heads, e = queries.shape
    layers, slots, kv_heads = keys.shape[1:4]
    r = pl.cdiv(t * heads // kv_heads, ROW_TILE) * ROW_TILE
    segments = pl.cdiv(slots, SEGMENT * BLOCK)

    def of_head(part: jax.Array) -> pl.BlockSpec:
        shape, rest = (None, layers, slots, None, *part.shape[4:]), (0,) * (part.ndim - 4)
        return pl.BlockSpec(shape, lambda i, j, n, s: (i, 0, 0, j, *rest))

    def of_rows(*rest: int) -> pl.BlockSpec:
        zeros = (0,) * len(rest)
        return pl.BlockSpec(
            (None, None, None, ROW_TILE, *rest), lambda i, j, n, s: (i, j, s, n, *zeros)
        )

    state = (b, kv_heads, segments, r, e)
    states = [jax.ShapeDtypeStruct(each, jnp.float32) for each in (state[:4], state[:4], state)]
    one = segments == 1
    pipelined = 2 * BLOCK * e * 2 <= PIPELINED_BYTES  # keys and values in bfloat16
    found: list[jax.Array] = pl.pallas_call(
        partial(
            _read_segment,
            visible=visible,
            output=output,
            width=_plane_width(e, keys),
            sinks=sinks,
            scale=shared.exponent_scale(head_scale),
        ),
        grid=(b, kv_heads, r // ROW_TILE, segments),
        in_specs=[
            pl.BlockSpec((None, t, heads, e), lambda i, j, n, s: (i, 0, 0, 0)),
            _of_tile(shown),
            pl.BlockSpec((None,), lambda i, j, n, s: (i,)),
            pl.BlockSpec((None,), lambda i, j, n, s: (0,)),
            *([of_head(part) for part in jax.tree.leaves(entries)] for entries in (keys, values)),
        ],
        out_specs=[whole(output.shape())] if one else [of_rows(*each.shape[4:]) for each in states],
        out_shape=[output.shape()] if one else states,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2 if pipelined else 1),
        interpret=interpret,
    )(queries, list(shown), lengths, layer[None], jax.tree.leaves(keys), jax.tree.leaves(values))
    return found


def _read_segment(
    queries: jax.Ref,
    shown: list[jax.Ref],
    length: jax.Ref,
    layer: jax.Ref,
    keys: list[jax.Ref],
    values: list[jax.Ref],
    *out: jax.Ref,
    visible: Callable[..., Any],
    output: Output,
    width: int,
    sinks: int,
    scale: float,
) -> None:
    """Computes one segment's state for one tile of R = ROW_TILE rows. The first reads the sinks.

    queries: [T, H, E]; shown, visible: see `_visible`; length, layer: int32[]; keys, values:
    [L, S, E] in a list, or codes, scales and zeros; out: the state, f32[R] twice and f32[R, E], or
    the result of a single segment, as in `output`.
    """
    context, number, segment = length[...], layer[...], pl.program_id(3)
    tile = pl.program_id(1), pl.program_id(2)
    columns, first_block, end_block = visible(shown, context, tile[1])
    first = jnp.maximum(first_block, segment * SEGMENT)
    end = jnp.minimum(end_block, (segment + 1) * SEGMENT)
    apart = jnp.where(segment == 0, shared.blocks_apart(first_block, sinks), 0)
    planes = [pl.ds(i, width) for i in range(0, queries.shape[2], width)]

    def state() -> shared.State:
        parts = [_rows(queries, tile, output.per_token, width, i) for i in range(len(planes))]

        def add(block: jax.Array, before: shared.State) -> shared.State:
            decoded, scales = _decode(keys, number, block, len(planes))
            products = [_dot(part, k, _LAST) for part, k in zip(parts, decoded, strict=True)]
            scores = sum(products[1:], products[0]) * scale
            scores = scores if scales is None else scores * scales

            def mix(weights: jax.Array) -> list[jax.Array]:
                decoded, scales = _decode(values, number, block, len(planes))
                weights = weights if scales is None else weights * scales
                return [_dot(weights.astype(jnp.bfloat16), v, _FIRST) for v in decoded]

            seen = shared.visible(columns, block, context, sinks)
            return shared.add_block(before, scores, seen, mix)

        before = shared.start(ROW_TILE, [width] * len(planes))
        if sinks:
            before = lax.fori_loop(0, apart, add, before)
        after: shared.State = lax.fori_loop(first, end, add, before)
        return after

    if len(out) == 1:
        output.store(out[0], shared.finish(state()))
        return

    @pl.when((first < end) | (apart > 0))
    def read() -> None:
        highest, weight, parts_of_sums = state()
        maximum, total, sums = out
        maximum[...], total[...] = highest[:, 0], weight[:, 0]
        for plane, part in zip(planes, parts_of_sums, strict=True):
            sums[:, plane] = part


def _rows(
    queries: jax.Ref, tile: tuple[jax.Array, jax.Array], per_token: int, width: int, plane: int
) -> jax.Array:
    """A tile's query rows of one key-value head: bf16[ROW_TILE, width], zeros behind the last.

    queries: [T, H, E]; tile: the head's and the tile's number; plane: which of the parts of a head.
    """
    tokens, (token, query) = queries.shape[0], tile_rows(tile, per_token)
    features = plane * width + jnp.arange(width)[None, :]
    inside = jnp.broadcast_to((token < tokens)[:, None], (ROW_TILE, width))
    at = queries.at[token[:, None], query[:, None], features]
    rows: jax.Array = pltriton.load(at, mask=inside, other=0.0)
    return rows


def _decode(
    parts: list[jax.Ref], layer: jax.Array, block: jax.Array, planes: int
) -> tuple[list[jax.Array], jax.Array | None]:
    """Decodes a block's entries: bf16[BLOCK, features] per plane, and their scales or None."""
    slots = pl.ds(block * BLOCK, BLOCK)
    if len(parts) == 1:
        return [lax.bitcast_convert_type(parts[0][layer, slots, :], jnp.bfloat16)], None
    codes, scales, zeros = (part[layer, slots, ...] for part in parts)
    codes = codes.astype(jnp.int32)
    codes = [codes & 0xF, codes >> 4] if planes == 2 else [codes]
    zeros = zeros.astype(jnp.int32)[:, None]
    decoded = [(code - zeros).astype(jnp.float32).astype(jnp.bfloat16) for code in codes]
    return decoded, scales[None, :]


def _dot(left: jax.Array, right: jax.Array, dimensions: lax.DotDimensionNumbers) -> jax.Array:
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def _merged(
    shown: Sequence[jax.Array],
    lengths: jax.Array,
    states: list[jax.Array],
    visible: Callable[..., Any],
    sinks: int,
    output: Output,
    interpret: bool,
) -> jax.Array:
    """Merges the states of all segments -> `output.shape`."""
    b, kv_heads, segments, r, e = states[2].shape
    y: jax.Array = pl.pallas_call(
        partial(_merge_segments, visible=visible, sinks=sinks, output=output),
        grid=(b, kv_heads, r // ROW_TILE),
        in_specs=[
            _of_tile(shown),
            pl.BlockSpec((None,), lambda i, j, n: (i,)),
            *[pl.BlockSpec((None, None, segments, ROW_TILE), lambda i, j, n: (i, j, 0, n))] * 2,
            pl.BlockSpec((None, None, segments, ROW_TILE, e), lambda i, j, n: (i, j, 0, n, 0)),
        ],
        out_specs=whole(output.shape()),
        out_shape=output.shape(),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(list(shown), lengths, *states)
    return y


def _merge_segments(
    shown: list[jax.Ref],
    length: jax.Ref,
    maximum: jax.Ref,
    total: jax.Ref,
    sums: jax.Ref,
    y: jax.Ref,
    *,
    visible: Callable[..., Any],
    sinks: int,
    output: Output,
) -> None:
    """Merges one tile's segments: f32[segments, R] twice, f32[segments, R, E] -> y, `output`."""

    def add(segment: jax.Array, state: shared.State) -> shared.State:
        later = maximum[segment, :][:, None], total[segment, :][:, None], (sums[segment, :, :],)
        return shared.merge(state, later)

    _, first_block, end_block = visible(shown, length[...], pl.program_id(2))
    first = first_block // SEGMENT
    end = jnp.where(first_block < end_block, pl.cdiv(end_block, SEGMENT), first)
    state = shared.start(ROW_TILE, sums.shape[2:])
    if sinks:
        state = lax.fori_loop(0, shared.blocks_apart(first, sinks), add, state)
    state = lax.fori_loop(first, end, add, state)
    output.store(y, shared.finish(state))
