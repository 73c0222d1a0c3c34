"""Attention of new tokens over the KV cache as one Pallas kernel for TPUs.

A step of the grid has a tile of query rows of one row, for HEADS of its key-value heads: a TPU
keeps so many heads of a slot in one tile of memory, and whoever reads one reads them all. The step
streams the cache as it is stored, BLOCK slots at a time while the last ones are multiplied, and
runs the softmax over them in slot order. Its first and last block are what its rows see, so the
cost follows the context in use, or the window. A head is taken out of the slots by a strided load;
16-bit entries of two heads share a word.

The meaning is that of `pallas_kernels.attention_reference`; with bfloat16 queries over a bfloat16
cache the softmax's weights are rounded to bfloat16 for the matrix unit. Products are summed in
float32.

Order of summation: block after block in slot order; within a block, what one product does. The
number of rows in a tile decides how many rows ride along and nothing else, so a row's bits depend
neither on T nor on its neighbours. As for products of bfloat16 (`quantized_matmul`), that rests on
the matrix unit and on Mosaic's `shape_invariant_numerics`, which is set by default, and no TPU was
at hand to see it.

Left out: heads narrower than a register's 128 lanes, whose cache XLA lays out with the slots
innermost, so that the kernel's operand would be a copy of all of it; wider ones, of which the
compiler loads no single head; 16-bit entries of other numbers of heads than 2, 4 and multiples of
8, which do not fill whole tiles of memory; quantized entries; more than one block to a copy, where
a block of few heads is small.
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

HEADS = 8  # of one step: they fill a register's rows, and while one waits for products others work
LANES = 128
ROW_PACKING = 16  # rows in a register of bfloat16
MOST_ROWS = 128
MOST_CACHE_BYTES = 8 * 2**20  # two blocks of keys and of values: half of what a kernel may hold
_UPPER_HALF = -(2**16)  # of a word, as a mask
_LAST, _FIRST = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))  # the right side's axis to sum


def attention_refusal(queries: jax.Array, keys: Entries, mask: jax.Array | None) -> str | None:
    """The reason why `attention` does not serve these operands; None where it does."""
    if not pltpu.is_tpu_device():  # the pipeline asks which TPU it is made for
        return "what is compiled for must be a TPU"
    if isinstance(keys, QuantizedEntries):
        return f"the cache must be of 16 or 32 bits, got codes of {keys.bits}"
    _, _, kv_heads, e = keys.shape
    if e != LANES:
        return f"head_dim must be {LANES}, got {e}"
    if keys.dtype == jnp.uint16 and _heads_of_step(kv_heads) not in (2, 4, HEADS):
        return f"16-bit entries must be of 2, 4 or a multiple of {HEADS} heads, got {kv_heads}"
    size = 4 * BLOCK * _heads_of_step(kv_heads) * e * keys.dtype.itemsize
    if size > MOST_CACHE_BYTES:
        return f"four blocks of the cache must fit {MOST_CACHE_BYTES} bytes, got {size}"
    return shared.mask_refusal(queries, mask)


def _heads_of_step(kv_heads: int) -> int:
    """Key-value heads that one step of the grid reads: whole registers' rows, or all there are."""
    return HEADS if kv_heads % HEADS == 0 else kv_heads


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
    interpret: bool = False,
) -> jax.Array:
    """`pallas_kernels.attention.attention`, for heads of 128 features.

    Args:
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Raises:
      ValueError: what `attention_refusal` says.
    """
    reason = attention_refusal(queries, keys, mask)
    if reason is not None:
        raise ValueError(reason)
    b, t, h, e = queries.shape
    slots, kv_heads = keys.shape[1:3]
    tile = min(-(-t * h // kv_heads // ROW_PACKING) * ROW_PACKING, MOST_ROWS)
    limits, blocks = shared.limits(
        lengths, positions, mask, window, rows_per_token=h // kv_heads, tile=tile, slots=slots
    )
    rows = shared.by_kv_head(queries, kv_heads, tile)
    heads = _heads_of_step(kv_heads)
    of_rows = pl.BlockSpec((None, heads, tile, e), lambda i, j, n, *_: (i, j, n, 0))
    of_limits = pl.BlockSpec((None, tile, limits.shape[2]), lambda i, j, n, *_: (i, n, 0))
    where_it_is = pl.BlockSpec(memory_space=pl.ANY)
    state = [(heads, tile, 1), (heads, tile, 1), (heads, tile, e)]
    y = pl.pallas_call(
        partial(_kernel, scale=shared.exponent_scale(head_scale)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(b, kv_heads // heads, rows.shape[2] // tile),
            in_specs=[of_rows, of_limits, where_it_is, where_it_is],
            out_specs=of_rows,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in state],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
    )(blocks[:, :, 0], blocks[:, :, 1], lengths, rows, limits, keys, values)
    return shared.by_token(y, queries.shape)


def _kernel(
    first: jax.Ref,
    end: jax.Ref,
    lengths: jax.Ref,
    q: jax.Ref,
    limits: jax.Ref,
    keys: jax.Ref,
    values: jax.Ref,
    y: jax.Ref,
    maximum: jax.Ref,
    total: jax.Ref,
    sums: jax.Ref,
    *,
    scale: float,
) -> None:
    """One step. first, end: int32[B, tiles] of blocks; lengths: int32[B]; keys, values: all of
    [B, S, K, E]; of the step q, y: [heads, R, E], limits: int32[R, columns], the softmax's state.
    """
    row, part, tile = (pl.program_id(axis) for axis in range(3))
    heads, rows, e = q.shape
    begin, context = first[row, tile], lengths[row]
    columns = [limits[:, i : i + 1] for i in range(limits.shape[1])]
    state = (maximum, total, sums)
    for ref, value in zip(state, jax.tree.leaves(shared.start(rows, [e])), strict=True):
        ref[...] = jnp.broadcast_to(value, ref.shape)

    def add(keys: jax.Ref, values: jax.Ref) -> None:
        """Adds one block, [BLOCK, heads, E] of each."""
        seen = shared.visible(columns, begin + pl.program_id(0), context)  # of the pipeline's grid
        for head in range(heads):
            k, v = _head(keys, head), _head(values, head)
            scores = _dot(q[head], k, _LAST) * scale

            def mix(weights: jax.Array, v: jax.Array = v) -> list[jax.Array]:
                return [_dot(weights.astype(q.dtype), v, _FIRST)]

            before = maximum[head], total[head], (sums[head],)
            maximum[head], total[head], (sums[head],) = shared.add_block(before, scores, seen, mix)

    block = pl.BlockSpec((None, BLOCK, heads, e), lambda i: (row, begin + i, part, 0))
    blocks = jnp.maximum(end[row, tile] - begin, 0)
    pltpu.emit_pipeline(add, grid=(blocks,), in_specs=[block, block])(keys, values)
    for head in range(heads):
        [y[head]] = shared.finish((maximum[head], total[head], (sums[head],)))


def _head(entries: Any, head: int) -> jax.Array:
    """One head of a block's entries, f32 or uint16[BLOCK, heads, E] -> f32 or bf16[BLOCK, E]."""
    slots, heads, e = entries.shape
    flat = entries.reshape(slots * heads, e)
    if entries.dtype == jnp.float32:
        values: jax.Array = flat[pl.ds(head, slots, stride=heads), :]
        return values
    pairs = flat.bitcast(jnp.int32)[pl.ds(head // 2, slots, stride=heads // 2), :]
    bits = pairs & _UPPER_HALF if head % 2 else pairs << 16
    return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)


def _dot(left: jax.Array, right: jax.Array, dimensions: lax.DotDimensionNumbers) -> jax.Array:
    """A product in the wider of the two types."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        dimensions,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
