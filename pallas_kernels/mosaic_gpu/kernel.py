"""The kernel: Hopper's `wgmma` on a packed weight that the TMA copies to shared memory.

The weight is the left operand and is unpacked in registers, so the few rows of x are the narrow
side of the product. One warpgroup copies; each of the others computes 64 outputs. The grid is
persistent: one block per multiprocessor walks over its work items. Copies run ahead into the next
item, so memory does not wait for products.

The inputs of a weight are split into segments of `per_segment` blocks of 256. The kernel computes

    y[m, n] = Σ_segment ( Σ_group scale[m, n, group] · product[m, n, group] )

with both sums from left to right. A work item is either one segment, whose sums are added
afterwards, or all of them. The additions are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace as Memory
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import words
from pallas_kernels.formats import BLOCK, PLANE
from pallas_kernels.mosaic_gpu import registers
from pallas_kernels.mosaic_gpu.plan import MULTIPROCESSORS, ROWS, Plan
from pallas_kernels.mosaic_gpu.registers import ACCUMULATOR, PACKED

COPY_REGISTERS = 40  # the copying warpgroup gives its registers to the two others
COMPUTE_REGISTERS = 232
# The accumulator with one value per register, which transposed stores need.
_SINGLE = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)
_PER_OUTPUT = ACCUMULATOR.reduce(1)  # one value per row of the accumulator
_PER_ROW = ACCUMULATOR.reduce(0)  # one per row of x
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")  # required in jax 0.10, not in 0.12
_LOAD_NEEDS_INDEX = _INDEX is not None and _INDEX.default is inspect.Parameter.empty

# The weight's scales and zeros in a block, f32[64] each. The lists may be empty.
OfOutputs = tuple[list[jax.Array], list[jax.Array]]


def call(plan: Plan, *operands: jax.Array, interpret: Any = None) -> tuple[jax.Array, ...]:
    """Runs the kernel.

    Args:
      plan: how the kernel runs.
      *operands: the arrays that `plan.of_x` names, then for every weight those that
        `plan.of_weight` names. x: int8 or bf16[M, K]; x_groups: f32[blocks, x_rows, M], the scales
        of x by group, then its sums by group if the weight has zeros; packed: uint8[L, N, K / 2];
        index: int32[1], which of the L matrices to read; scales: [L, N, blocks · groups]; zeros:
        int8[L, N, blocks · groups or 1].
      interpret: Pallas's parameters for interpret mode, or None.

    Returns:
      For every weight the sum of each part: f32 or int32[parts, M, N].
    """
    sums: tuple[jax.Array, ...] = plgpu.kernel(
        partial(_body, plan),
        out_type=tuple(
            jax.ShapeDtypeStruct((plan.parts, plan.m, n), plan.sum_dtype) for n in plan.outputs
        ),
        scratch_types=_scratch(plan),
        grid=(min(plan.items, MULTIPROCESSORS),),
        grid_names=("block",),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="specjax_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*operands)
    return sums


def _scratch(plan: Plan) -> dict[str, Any]:
    """Shared memory: a ring buffer of blocks, with a full and an empty barrier per slot."""
    arrivals = 2 + ("x_groups" in plan.of_x)
    scratch = {
        "packed_ring": _swizzled((plan.stages, plan.n_tile, PLANE), jnp.uint8, PLANE),
        "x_ring": _swizzled((plan.stages, plan.m_tile, BLOCK), plan.decoder.dtype, plan.swizzle),
        "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=plan.stages),
        "empty": plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
    }
    if "x_groups" in plan.of_x:
        shape = (plan.stages, plan.x_rows, plan.m_tile)
        scratch["x_groups_ring"] = plgpu.SMEM(shape, jnp.float32)
    if plan.interpreted:
        shape = (plan.warpgroups, ROWS, plan.width)
        scratch["operand"] = plgpu.SMEM(shape, plan.decoder.dtype)
    return scratch


def _swizzled(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Shared memory in the layout that `wgmma` reads: tiles of 8 rows of `swizzle` bytes."""
    gpu: Any = plgpu  # the types of jax 0.11 call its transforms abstract
    tiling = gpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, gpu.SwizzleTransform(swizzle)))


def _body(plan: Plan, *refs: jax.Ref, **scratch: jax.Ref) -> None:
    """One block of the grid. Its last warpgroup copies; the others compute."""
    memories = _memories(plan, refs, scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == plan.warpgroups)
    def copy() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        done = _walk(plan, memories, partial(_copy_segment, plan))

        def drain(i: jax.Array, _: None) -> None:
            plgpu.barrier_wait(memories[0].empty.at[lax.rem(i, jnp.int32(plan.stages))])

        lax.fori_loop(jnp.maximum(done - plan.stages, 0), done, drain, None)

    @pl.when(warpgroup < plan.warpgroups)
    def compute() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _walk(plan, memories, partial(_compute_segment, plan, warpgroup))


def _memories(plan: Plan, refs: Sequence[jax.Ref], scratch: dict[str, Any]) -> list[Memory]:
    """The arrays that a work item uses, for every weight: x's, its own and the ring's."""
    given = iter(refs)
    of_x = {name: next(given) for name in plan.of_x}
    of_weights = [{name: next(given) for name in plan.of_weight} for _ in plan.outputs]
    memories = [Memory(**scratch, **of_x, **arrays, out=None) for arrays in of_weights]
    for memory, out in zip(memories, given, strict=True):
        memory.out, memory.index = out, memory.index[0]
    return memories


def _walk(plan: Plan, memories: list[Memory], visit: Callable[..., None]) -> jax.Array:
    """Calls visit(memory, row, column, part, segment, done) for this block's share of the work.

    Row and column index the tile, of the weight whose memory it is. `done` is the number of input
    blocks visited before the call.

    Returns:
      The number of input blocks visited in total.
    """
    rows, columns = plan.m // plan.m_tile, plan.n // plan.n_tile
    grid, per_part = min(plan.items, MULTIPROCESSORS), plan.segments // plan.parts
    block = lax.axis_index("block")

    def item(i: jax.Array, done: jax.Array) -> jax.Array:
        # Consecutive items share a tile of the weight, so later ones read it from the cache.
        tile, row = _divide(block + i * grid, rows)
        part, column = _divide(tile, columns)

        def segment(s: jax.Array, done: jax.Array) -> jax.Array:
            first = 0
            for memory, n in zip(memories, plan.outputs, strict=True):
                own = partial(visit, memory, row, column - first, part, s, done)
                end = first + n // plan.n_tile
                pl.when((column >= first) & (column < end))(own) if len(memories) > 1 else own()
                first = end
            return done + _steps(plan, s)

        visited: jax.Array = lax.fori_loop(part * per_part, (part + 1) * per_part, segment, done)
        return visited

    count = lax.div(plan.items - 1 - block, jnp.int32(grid)) + 1
    visited: jax.Array = lax.fori_loop(0, count, item, jnp.int32(0))
    return visited


def _divide(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def _steps(plan: Plan, segment: jax.Array) -> jax.Array:
    """The number of input blocks in a segment. The last segment may be shorter."""
    return jnp.minimum(plan.per_segment, plan.blocks - segment * plan.per_segment)


def _copy_segment(
    plan: Plan,
    memory: Memory,
    row: jax.Array,
    column: jax.Array,
    part: jax.Array,
    segment: jax.Array,
    done: jax.Array,
) -> None:
    """Copies a segment's blocks to the ring buffer, each as soon as its slot is free."""
    del part
    rows = pl.ds(row * plan.m_tile, plan.m_tile)
    outputs = pl.ds(column * plan.n_tile, plan.n_tile)

    def step(i: jax.Array, _: None) -> None:
        slot = lax.rem(done + i, jnp.int32(plan.stages))
        block = segment * plan.per_segment + i

        @pl.when(done + i >= plan.stages)
        def wait() -> None:
            plgpu.barrier_wait(memory.empty.at[slot])

        full = memory.full.at[slot]
        packed = memory.packed.at[memory.index, outputs, pl.ds(block * PLANE, PLANE)]
        plgpu.copy_gmem_to_smem(packed, memory.packed_ring.at[slot], full)
        x = memory.x.at[rows, pl.ds(block * BLOCK, BLOCK)]
        plgpu.copy_gmem_to_smem(x, memory.x_ring.at[slot], full)
        if "x_groups" in plan.of_x:
            x_groups = memory.x_groups.at[block, :, rows]
            plgpu.copy_gmem_to_smem(x_groups, memory.x_groups_ring.at[slot], full)

    lax.fori_loop(0, _steps(plan, segment), step, None)


def _compute_segment(
    plan: Plan,
    warpgroup: jax.Array,
    memory: Memory,
    row: jax.Array,
    column: jax.Array,
    part: jax.Array,
    segment: jax.Array,
    done: jax.Array,
) -> None:
    """Computes a segment's sum and writes it, or adds it to the sum of earlier segments."""
    first, steps = segment * plan.per_segment, _steps(plan, segment)
    outputs = pl.ds(column * plan.n_tile + warpgroup * ROWS, ROWS)

    def step(i: jax.Array, carry: tuple[jax.Array, OfOutputs]) -> tuple[jax.Array, OfOutputs]:
        total, of_outputs = carry
        # The weight's scales for the next block are loaded during this one.
        upcoming = _of_outputs(plan, memory, outputs, first + jnp.minimum(i + 1, steps - 1))
        slot = lax.rem(done + i, jnp.int32(plan.stages))
        plgpu.barrier_wait(memory.full.at[slot])
        total = _add_block(plan, memory, warpgroup, slot, of_outputs, total)
        plgpu.barrier_arrive(memory.empty.at[slot])
        return total, upcoming

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, plan.m_tile), plan.sum_dtype), ACCUMULATOR)
    carry = zeros, _of_outputs(plan, memory, outputs, first)
    total, _ = lax.fori_loop(0, steps, step, carry)
    here = memory.out.at[part, pl.ds(row * plan.m_tile, plan.m_tile), outputs].T
    total = plgpu.layout_cast(total, _SINGLE)
    if plan.parts == plan.segments:
        here[...] = total
        return

    @pl.when(segment == 0)
    def begin() -> None:
        here[...] = total

    @pl.when(segment > 0)
    def add() -> None:
        here[...] = _load(here, _SINGLE) + total


def _of_outputs(
    plan: Plan, memory: Memory, outputs: slice | pl.Slice, block: jax.Array
) -> OfOutputs:
    """Loads the weight's scales and zeros of a block: f32[64] each. The lists may be empty."""

    def column(ref: jax.Ref, group: int) -> jax.Array:
        at = block * plan.groups + group if ref.shape[2] > 1 else 0
        return _load(ref.at[memory.index, outputs, at], _PER_OUTPUT)

    scales, zeros = [], []
    if plan.scaled:
        columns = [column(memory.scales, group) for group in range(plan.groups)]
        decode = _exponents if plan.exponents else lambda x: x.astype(jnp.float32)
        scales = [decode(x) / plan.decoder.factor for x in columns]
    if plan.zeros:
        groups = plan.groups if memory.zeros.shape[2] > 1 else 1
        zeros = [column(memory.zeros, group).astype(jnp.float32) for group in range(groups)]
    return scales, zeros


def _exponents(code: jax.Array) -> jax.Array:
    """Computes 2^(code - 128) exactly: uint8[N] -> f32[N]. See `formats.group_scales`."""
    code = code.astype(jnp.int32)
    bits = jnp.where(code == 255, 0x7FC00000, jnp.maximum(code << 23, 1 << 22))
    return lax.bitcast_convert_type(bits, jnp.float32) * 0.5


def _add_block(
    plan: Plan,
    memory: Memory,
    warpgroup: jax.Array,
    slot: jax.Array,
    of_outputs: OfOutputs,
    total: jax.Array,
) -> jax.Array:
    """Adds a block's products (256 inputs) to a segment's sum, group by group."""
    packed = _load(memory.packed_ring.at[slot, pl.ds(warpgroup * ROWS, ROWS)], PACKED)
    per_plane = PLANE // plan.group

    def issue(product: Any, group: int, left: jax.Array) -> None:
        if plan.interpreted:  # interpret mode does not support an operand in registers
            memory.operand[warpgroup] = left
            left = memory.operand.at[warpgroup]
        inputs = pl.ds(group * plan.group // plan.width * plan.width, plan.width)
        plgpu.wgmma(product, left, memory.x_ring.at[slot, :, inputs].T)

    for first in range(0, plan.groups, plan.in_flight):

        def add(*products: Any, first: int = first, total: jax.Array = total) -> jax.Array:
            # The second plane is unpacked while the tensor cores multiply the first.
            for i, product in enumerate(products):
                if i % per_plane == 0:
                    lefts = _operands(plan, packed, (first + i) // per_plane, of_outputs)
                issue(product, first + i, lefts[i % per_plane])
            for i, product in enumerate(products):
                value = plgpu.wgmma_accumulator_load(product, wait_n=len(products) - 1 - i)
                total = _add_product(plan, memory, slot, first + i, of_outputs, value, total)
            return total

        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, plan.m_tile), plan.product_dtype)
        total = pl.run_scoped(add, *[accumulator] * plan.in_flight)
    return total


def _operands(plan: Plan, packed: jax.Array, plane: int, of_outputs: OfOutputs) -> list[jax.Array]:
    """The left operand of each group in a plane: int8 or bf16[64, width]."""
    unpack = words.unpack if plan.interpreted else registers.unpack
    operands = unpack(packed, plan.decoder, plane, plan.group, plan.width)
    _, zeros = of_outputs
    if plan.integer or not zeros:
        return operands
    # q - zero is at most 135 and exact in bfloat16.
    zeros = [_spread(zero.astype(jnp.bfloat16), operands[0].shape, 0) for zero in zeros]
    first = plane * len(operands)
    return [operand - zeros[(first + i) % len(zeros)] for i, operand in enumerate(operands)]


def _add_product(
    plan: Plan,
    memory: Memory,
    slot: jax.Array,
    group: int,
    of_outputs: OfOutputs,
    product: jax.Array,
    total: jax.Array,
) -> jax.Array:
    """Computes total + scale · product. product: f32 or int32[64, M]."""
    product = plgpu.layout_cast(product, ACCUMULATOR)
    if not plan.scaled:
        return total + product
    scales, zeros = of_outputs
    product, scale = product.astype(jnp.float32), _spread(scales[group], total.shape, 0)
    fma = _plain_multiply_add if plan.interpreted else registers.multiply_add
    if plan.integer:
        of_x = memory.x_groups_ring.at[slot]
        if zeros:
            sums = _spread(_load(of_x.at[plan.groups + group], _PER_ROW), total.shape, 1)
            product = fma(_spread(-zeros[group], total.shape, 0), sums, product)
        scale = scale * _spread(_load(of_x.at[group], _PER_ROW), total.shape, 1)
    return fma(product, scale, total)


def _plain_multiply_add(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    return x * y + z


def _spread(vector: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Broadcasts a vector along `axis` to a matrix in the accumulator's layout."""
    spread: jax.Array = plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), ACCUMULATOR)
    return spread


def _load(ref: Any, layout: Any) -> jax.Array:
    """Loads a reference in a layout. jax 0.10 requires an index; 0.11 warns about one."""
    index = ((),) if _LOAD_NEEDS_INDEX else ()
    values: jax.Array = plgpu.load(ref, *index, layout=layout, optimized=False)
    return values
