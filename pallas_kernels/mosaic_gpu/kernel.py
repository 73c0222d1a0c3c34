"""The kernel: Hopper's `wgmma` on a packed weight that the TMA copies to shared memory.

The weight is the left operand and is unpacked in registers, so the few rows of x are the narrow
side of the product. One warpgroup copies; each of the others computes 64 outputs
(`mosaic_gpu.compute`). The grid is persistent: its blocks, one or a few per multiprocessor, walk
over the work items. Copies run ahead into the next item, so memory does not wait for products.

The inputs of a weight are split into segments of `per_segment` blocks of 256. The kernel computes

    y[m, n] = Σ_segment ( Σ_group scale[m, n, group] · product[m, n, group] )

with both sums from left to right. A work item is either one segment, whose sums are added
afterwards, or all of them. The additions are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace as Memory
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import BLOCK, PLANE
from pallas_kernels.mosaic_gpu.compute import compute_item
from pallas_kernels.mosaic_gpu.plan import ROWS, Plan

COPY_REGISTERS = 24  # the copying warpgroup gives its registers to the two others
COMPUTE_REGISTERS = 240


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
        grid=(plan.grid,),
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
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

    @pl.when(warpgroup == plan.warpgroups)
    def copy() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _copy(plan, block, lambda: _memories(plan, refs, scratch))

    @pl.when(warpgroup < plan.warpgroups)
    def compute() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        memories = _memories(plan, refs, scratch)
        _walk(plan, block, memories, partial(compute_item, plan, warpgroup))


def _memories(plan: Plan, refs: Sequence[jax.Ref], scratch: dict[str, Any]) -> list[Memory]:
    """The arrays that a work item uses, for every weight: x's, its own and the ring's.

    It reads the matrix's number, so it is called as late as possible.
    """
    given = iter(refs)
    of_x = {name: next(given) for name in plan.of_x}
    of_weights = [{name: next(given) for name in plan.of_weight} for _ in plan.outputs]
    memories = [Memory(**scratch, **of_x, **arrays, out=None) for arrays in of_weights]
    for memory, out in zip(memories, given, strict=True):
        memory.out, memory.index = out, memory.index[0]
    return memories


def _walk(
    plan: Plan, block: jax.Array, memories: list[Memory], visit: Callable[..., None]
) -> jax.Array:
    """Calls visit(memory, row, column, part, done) for every work item of a block of the grid.

    Row and column index the tile, of the weight whose memory it is. `done` is the number of input
    blocks of the items before.

    Returns:
      The number of input blocks of all items.
    """
    rows, columns = plan.m // plan.m_tile, plan.n // plan.n_tile

    def item(i: jax.Array, done: jax.Array) -> jax.Array:
        # Consecutive items share a tile of the weight, so later ones read it from the cache.
        tile, row = _divide(block + i * plan.grid, rows)
        part, column = _divide(tile, columns)
        first = 0
        for memory, n in zip(memories, plan.outputs, strict=True):
            own = partial(visit, memory, row, column - first, part, done)
            end = first + n // plan.n_tile
            pl.when((column >= first) & (column < end))(own) if len(memories) > 1 else own()
            first = end
        return done + plan.steps(part * plan.per_part, plan.per_part)

    count = lax.div(plan.items - 1 - block, jnp.int32(plan.grid)) + 1
    visited: jax.Array = lax.fori_loop(0, count, item, jnp.int32(0))
    return visited


def _divide(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def _copy(plan: Plan, block: jax.Array, memories: Callable[[], list[Memory]]) -> None:
    """Copies the operands of all work items: one warp the weight's, another those of x."""

    @plgpu.warp_map
    def warps(warp: jax.Array) -> None:
        for number, names in enumerate((("packed",), ("x", "x_groups"))):

            @pl.when(warp == number)
            def copy(names: tuple[str, ...] = names) -> None:
                _copy_items(plan, block, memories(), names)


def _copy_items(
    plan: Plan, block: jax.Array, memories: list[Memory], names: tuple[str, ...]
) -> None:
    """Copies the named arrays of all work items, and then waits until all slots are empty."""
    done = _walk(plan, block, memories, partial(_copy_item, plan, names))

    def drain(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(memories[0].empty.at[lax.rem(i, jnp.int32(plan.stages))])

    lax.fori_loop(jnp.maximum(done - plan.stages, 0), done, drain, None)


def _copy_item(
    plan: Plan,
    names: tuple[str, ...],
    memory: Memory,
    row: jax.Array,
    column: jax.Array,
    part: jax.Array,
    done: jax.Array,
) -> None:
    """Copies an item's blocks to the ring buffer, each as soon as its slot is free."""
    rows = pl.ds(row * plan.m_tile, plan.m_tile)
    outputs = pl.ds(column * plan.n_tile, plan.n_tile)
    first = part * plan.per_part

    def step(i: jax.Array, _: None) -> None:
        slot = lax.rem(done + i, jnp.int32(plan.stages))
        block = first * plan.per_segment + i

        @pl.when(done + i >= plan.stages)
        def wait() -> None:
            plgpu.barrier_wait(memory.empty.at[slot])

        def copy(source: Any, ring: Any) -> None:
            plgpu.copy_gmem_to_smem(source, ring.at[slot], memory.full.at[slot])

        if "packed" in names:
            inputs = pl.ds(block * PLANE, PLANE)
            copy(memory.packed.at[memory.index, outputs, inputs], memory.packed_ring)
        if "x" in names:
            copy(memory.x.at[rows, pl.ds(block * BLOCK, BLOCK)], memory.x_ring)
        if "x_groups" in names and "x_groups" in plan.of_x:
            copy(memory.x_groups.at[block, :, rows], memory.x_groups_ring)

    lax.fori_loop(0, plan.steps(first, plan.per_part), step, None)
