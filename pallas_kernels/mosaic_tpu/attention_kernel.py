"""Attention of new tokens over the KV cache as one Pallas kernel for TPUs.

Each grid step serves a tile of query rows of one batch row, for HEADS of its key-value heads. A TPU
stores that many heads of a slot in one memory tile, so a read of one head reads all of them. The
step streams the stored cache in blocks of BLOCK slots, overlaps copies with products, and runs the
softmax in slot order. It reads only the blocks that its rows see, so the cost follows the context
in use, or the window. A strided load extracts one head; two heads of 16-bit entries share a word.

`pallas_kernels.attention_reference` defines the result. With bfloat16 queries and cache, the
softmax weights are rounded to bfloat16 for the matrix unit. Products are summed in float32.

Summation order: blocks in slot order, and one product per block. The tile size does not change a
row's sums, so a row's bits depend neither on T nor on its neighbours. This relies on the matrix
unit and on Mosaic's `shape_invariant_numerics`, which is on by default. It has not been verified on
a TPU.

Not implemented:

- heads narrower than the 128 lanes of a register: XLA lays out their cache with the slots
  innermost, so the kernel would need a copy of the whole cache;
- wider heads: the compiler cannot load a single one;
- 16-bit entries unless the number of heads is 2, 4 or a multiple of 8: others leave memory tiles
  partly empty;
- quantized entries;
- copies of several blocks at once, where few heads make a block small.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import attention_operands as shared
from pallas_kernels.attention_reference import BLOCK
from pallas_kernels.cache_entries import Entries, QuantizedEntries

HEADS = 8  # per step: they fill a register's rows, and their work overlaps
LANES = 128
ROW_PACKING = 16  # rows in a bfloat16 register
MOST_ROWS = 128
MOST_CACHE_BYTES = 8 * 2**20  # two blocks each of keys and values: half of a kernel's VMEM
_UPPER_HALF = -(2**16)  # mask of a word's upper half
_LAST, _FIRST = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))  # the right axis to contract


def attention_refusal(queries: jax.Array, keys: Entries, mask: jax.Array | None) -> str | None:
    """Returns why `attention` does not serve these operands; None if it does."""
    if not pltpu.is_tpu_device():  # the pipeline needs to know its TPU
        return "the target device must be a TPU"
    if isinstance(keys, QuantizedEntries):
        return f"cache entries must have 16 or 32 bits, got {keys.bits}-bit codes"
    kv_heads, e = keys.shape[3:]
    if e != LANES:
        return f"head_dim must be {LANES}, got {e}"
    if keys.dtype == jnp.uint16 and _heads_of_step(kv_heads) not in (2, 4, HEADS):
        return f"16-bit entries must have 2, 4 or a multiple of {HEADS} heads, got {kv_heads}"
    size = 4 * BLOCK * _heads_of_step(kv_heads) * e * keys.dtype.itemsize
    if size > MOST_CACHE_BYTES:
        return f"four blocks of the cache must fit {MOST_CACHE_BYTES} bytes, got {size}"
    return shared.mask_refusal(queries, mask)


def _heads_of_step(kv_heads: int) -> int:
    """Key-value heads that a grid step reads: HEADS if it divides their number, else all."""
    return HEADS if kv_heads % HEADS == 0 else kv_heads


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
    interpret: bool = False,
) -> jax.Array:
    """Computes `pallas_kernels.attention.attention` for heads of 128 features.

    Args:
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Raises:
      ValueError: `attention_refusal` returns a reason.
    """
    reason = attention_refusal(queries, keys, mask)
    if reason is not None:
        raise ValueError(reason)
    b, t, h, e = queries.shape
    slots, kv_heads = keys.shape[2:4]
    tile = min(-(-t * h // kv_heads // ROW_PACKING) * ROW_PACKING, MOST_ROWS)
    limits, blocks = shared.limits(
        lengths, positions, mask, window, sinks,
        rows_per_token=h // kv_heads, tile=tile, slots=slots,
    )  # fmt: skip
    sinks = 0 if window is None else sinks
    rows = shared.by_kv_head(queries, kv_heads, tile)
    heads = _heads_of_step(kv_heads)
    of_rows = pl.BlockSpec((None, heads, tile, e), lambda i, j, n, *_: (i, j, n, 0))
    of_limits = pl.BlockSpec((None, tile, limits.shape[2]), lambda i, j, n, *_: (i, n, 0))
    where_it_is = pl.BlockSpec(memory_space=pl.ANY)
    state = [(heads, tile, 1), (heads, tile, 1), (heads, tile, e)]
    y = pl.pallas_call(
        partial(_kernel, sinks=sinks, scale=shared.exponent_scale(head_scale)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(b, kv_heads // heads, rows.shape[2] // tile),
            in_specs=[of_rows, of_limits, where_it_is, where_it_is],
            out_specs=of_rows,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in state],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
    )(blocks[:, :, 0], blocks[:, :, 1], lengths, layer[None], rows, limits, keys, values)
    return shared.by_token(y, queries.shape)


def _kernel(
    first: jax.Ref,
    end: jax.Ref,
    lengths: jax.Ref,
    layer: jax.Ref,
    q: jax.Ref,
    limits: jax.Ref,
    keys: jax.Ref,
    values: jax.Ref,
    y: jax.Ref,
    maximum: jax.Ref,
    total: jax.Ref,
    sums: jax.Ref,
    *,
    sinks: int,
    scale: float,
) -> None:
    """Computes one grid step.

    first, end: int32[B, tiles], block numbers; lengths: int32[B]; layer: int32[1]; keys, values:
    [B, L, S, K, E]. This step has q, y: [heads, R, E]; limits: int32[R, columns]; maximum, total:
    f32[heads, R, 1]; sums: f32[heads, R, E].
    """
    row, part, tile = (pl.program_id(axis) for axis in range(3))
    heads, rows, e = q.shape
    begin, context, number = first[row, tile], lengths[row], layer[0]
    columns = [limits[:, i : i + 1] for i in range(limits.shape[1])]
    state = (maximum, total, sums)
    apart = shared.blocks_apart(begin, sinks)

    def number_of(step: jax.Array) -> jax.Array:
        """The block that comes as number `step`: those of sinks first."""
        return jnp.where(step < apart, step, begin + step - apart)

    for ref, value in zip(state, jax.tree.leaves(shared.start(rows, [e])), strict=True):
        ref[...] = jnp.broadcast_to(value, ref.shape)

    def add(keys: jax.Ref, values: jax.Ref) -> None:
        """Adds one block. keys, values: [BLOCK, heads, E]."""
        block = number_of(pl.program_id(0))  # of the pipeline's grid
        seen = shared.visible(columns, block, context, sinks)
        for head in range(heads):
            k, v = _head(keys, head), _head(values, head)
            scores = _dot(q[head], k, _LAST) * scale

            def mix(weights: jax.Array, v: jax.Array = v) -> list[jax.Array]:
                return [_dot(weights.astype(q.dtype), v, _FIRST)]

            before = maximum[head], total[head], (sums[head],)
            maximum[head], total[head], (sums[head],) = shared.add_block(before, scores, seen, mix)

    shape = (None, None, BLOCK, heads, e)
    block = pl.BlockSpec(shape, lambda i: (row, number, number_of(i), part, 0))
    blocks = jnp.maximum(end[row, tile] - begin + apart, 0)
    pltpu.emit_pipeline(add, grid=(blocks,), in_specs=[block, block])(keys, values)
    for head in range(heads):
        [y[head]] = shared.finish((maximum[head], total[head], (sums[head],)))


def _head(entries: Any, head: int) -> jax.Array:
    """Extracts one head of a block: f32 or uint16[BLOCK, heads, E] -> f32 or bf16[BLOCK, E]."""
    slots, heads, e = entries.shape
    flat = entries.reshape(slots * heads, e)
    if entries.dtype == jnp.float32:
        values: jax.Array = flat[pl.ds(head, slots, stride=heads), :]
        return values
    pairs = flat.bitcast(jnp.int32)[pl.ds(head // 2, slots, stride=heads // 2), :]
    bits = pairs & _UPPER_HALF if head % 2 else pairs << 16
    return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)


def _dot(left: jax.Array, right: jax.Array, dimensions: lax.DotDimensionNumbers) -> jax.Array:
    """Multiplies in the wider of the two dtypes and sums in float32."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        dimensions,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
