"""The half of the kernel that computes: a warpgroup's 64 outputs of one work item."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace as Memory
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import words
from pallas_kernels.formats import PLANE
from pallas_kernels.mosaic_gpu import registers
from pallas_kernels.mosaic_gpu.plan import ROWS, Plan
from pallas_kernels.mosaic_gpu.registers import ACCUMULATOR, PACKED

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


def compute_item(
    plan: Plan,
    warpgroup: jax.Array,
    memory: Memory,
    row: jax.Array,
    column: jax.Array,
    part: jax.Array,
    done: jax.Array,
) -> None:
    """Computes the sum of an item's segments and writes it. See `kernel._walk`."""
    outputs = pl.ds(column * plan.n_tile + warpgroup * ROWS, ROWS)
    here = memory.out.at[part, pl.ds(row * plan.m_tile, plan.m_tile), outputs].T
    first = part * plan.per_part
    sum_of = partial(_segment_sum, plan, warpgroup, memory, outputs)

    def earlier(segment: jax.Array) -> jax.Array:
        """The number of blocks before a segment of this item."""
        return done + (segment - first) * plan.per_segment

    if plan.per_part == 1:
        here[...] = plgpu.layout_cast(sum_of(first, done), _SINGLE)
        return
    segments = first, first + plan.per_part
    if plan.sums_stay:

        def join(segment: jax.Array, total: jax.Array) -> jax.Array:
            return total + sum_of(segment, earlier(segment))

        # -0 + x is x for every x; 0 + x would lose the sign of -0.
        nothing = _full(plan, -0.0 if plan.scaled or not plan.integer else 0)
        here[...] = plgpu.layout_cast(lax.fori_loop(*segments, join, nothing), _SINGLE)
        return

    def add(segment: jax.Array, _: None) -> None:
        total = plgpu.layout_cast(sum_of(segment, earlier(segment)), _SINGLE)

        @pl.when(segment == first)
        def begin() -> None:
            here[...] = total

        @pl.when(segment > first)
        def go_on() -> None:
            here[...] = _load(here, _SINGLE) + total

    lax.fori_loop(*segments, add, None)


def _full(plan: Plan, value: float) -> jax.Array:
    """A constant of the sums' shape and dtype."""
    values: jax.Array = plgpu.layout_cast(
        jnp.full((ROWS, plan.m_tile), value, plan.sum_dtype), ACCUMULATOR
    )
    return values


def _segment_sum(
    plan: Plan,
    warpgroup: jax.Array,
    memory: Memory,
    outputs: slice | pl.Slice,
    segment: jax.Array,
    done: jax.Array,
) -> jax.Array:
    """Computes a segment's sum, [64, M]. `done` blocks went through the ring before it."""
    first, steps = segment * plan.per_segment, plan.steps(segment, 1)

    def scales(i: Any, count: int) -> list[OfOutputs]:
        blocks = [first + jnp.minimum(i + each, steps - 1) for each in range(count)]
        return [_of_outputs(plan, memory, outputs, block) for block in blocks]

    def add(count: int, start: Any, times: Any, total: jax.Array) -> jax.Array:
        """Adds blocks from `start` on, `count` at a time."""

        def step(j: jax.Array, carry: tuple[jax.Array, list[OfOutputs]]) -> Any:
            total, of_outputs = carry
            i = start + j * count
            # The weight's scales for the next blocks are loaded during these.
            upcoming = scales(i + count, count)
            slots = [lax.rem(done + i + each, jnp.int32(plan.stages)) for each in range(count)]
            return _add_blocks(plan, memory, warpgroup, slots, of_outputs, total), upcoming

        if isinstance(times, int) and times == 0:
            return total
        added: jax.Array = lax.fori_loop(0, times, step, (total, scales(start, count)))[0]
        return added

    count = plan.together
    total = add(count, 0, steps // count, _full(plan, 0))
    return add(1, steps - steps % count, steps % count, total) if count > 1 else total


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


def _add_blocks(
    plan: Plan,
    memory: Memory,
    warpgroup: jax.Array,
    slots: list[jax.Array],
    of_outputs: list[OfOutputs],
    total: jax.Array,
) -> jax.Array:
    """Adds the products of blocks (256 inputs each) to a segment's sum, group by group."""
    per_plane = PLANE // plan.group

    def issue(product: Any, slot: jax.Array, group: int, left: jax.Array) -> None:
        if plan.interpreted:  # interpret mode does not support an operand in registers
            memory.operand[warpgroup] = left
            left = memory.operand.at[warpgroup]
        inputs = pl.ds(group * plan.group // plan.width * plan.width, plan.width)
        plgpu.wgmma(product, left, memory.x_ring.at[slot, :, inputs].T)

    def load(slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(memory.full.at[slot])
        return _load(memory.packed_ring.at[slot, pl.ds(warpgroup * ROWS, ROWS)], PACKED)

    packed = [load(slots[0])]

    def add(*products: Any, first: int, total: jax.Array) -> jax.Array:
        # A plane is unpacked while the tensor cores multiply the one before.
        places: list[tuple[int, int]] = []  # block and group of each product
        for block, slot in enumerate(slots):
            if block == len(packed):
                packed.append(load(slot))
            for group in range(first, first + plan.in_flight):
                if group % per_plane == 0:
                    plane = group // per_plane
                    lefts = _operands(plan, packed[block], plane, of_outputs[block])
                issue(products[len(places)], slot, group, lefts[group % per_plane])
                places.append((block, group))
        for i, (block, group) in enumerate(places):
            value = plgpu.wgmma_accumulator_load(products[i], wait_n=len(places) - 1 - i)
            total = _add_product(plan, memory, slots[block], group, of_outputs[block], value, total)
        return total

    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, plan.m_tile), plan.product_dtype)
    accumulators = [accumulator] * plan.in_flight * len(slots)
    for first in range(0, plan.groups, plan.in_flight):
        step = partial(add, first=first, total=total)
        total = pl.run_scoped(step, *accumulators)
    for slot in slots:
        plgpu.barrier_arrive(memory.empty.at[slot])
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
