"""W4A16, W4A8 and W4A4 for Hopper GPUs, by Pallas Mosaic GPU.

`pallas_kernels.reference` defines the result. Rounding differs in two places: "a16" rounds a
float32 x to bfloat16 for the tensor cores, and scales multiply group sums instead of weights.
Group sums keep every product exact, because a weight's integer times a bfloat16 has 12 bits. They
also let all precisions share one kernel, at one operation per output and group. Hopper has no 4-bit
integer products, so "a4" is "a8" on a coarser grid.

**Batch invariance.** A row's bits do not depend on M:

- The shape of the weight alone decides its segments (`_segment`) and their groups.
- A group's product is a fixed sequence of `wgmma` instructions over 16 (bf16) or 32 (int8) inputs,
  k ascending. M sets only the instruction's N, the number of independent columns. Integer sums are
  exact in any order.
- Explicit fused multiply-adds add the group sums, so compilers cannot change the rounding. Plain
  additions add the segments' sums from left to right, inside the kernel or after it.

The tensor cores are expected to round a column alike for every N, but NVIDIA's manual does not
promise it. This has not been verified on a Hopper GPU.

Not implemented: tuned tiles, a prepacked layout, multicast of x within a cluster, and `Int8Weight`
(the Triton kernel serves it). `pallas_kernels.matmul` adds outliers.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activations import Activation
from pallas_kernels.formats import PLANE, Int4Weight, Mxfp4Weight, Quantized, padded_inputs
from pallas_kernels.mosaic_gpu import words
from pallas_kernels.mosaic_gpu.kernel import call
from pallas_kernels.mosaic_gpu.plan import MULTIPROCESSORS, Plan
from pallas_kernels.operands import check, group_parts, multiplicands
from pallas_kernels.stacks import Stacked, form, in_stack, taken_shapes

ROW_TILES = (8, 16, 32, 64, 128)  # rows of x per work item; the smallest that fits is taken
COLUMN_TILES = (128, 64)  # outputs per work item; the largest that divides N is taken
MIN_SEGMENT = 4  # blocks; shorter sums would take longer to write than to compute
_DECODERS = {
    (Int4Weight, False): words.INT4_BF16,
    (Int4Weight, True): words.INT4_INT8,
    (Mxfp4Weight, False): words.MXFP4_BF16,
    (Mxfp4Weight, True): words.MXFP4_INT8,
}


def supports(weight: Any) -> bool:
    """Whether `matmul` serves this weight: 4 bits, no minima, a multiple of 64 outputs."""
    held = form(weight)
    if not isinstance(held, Int4Weight | Mxfp4Weight) or "minima" in group_parts(held):
        return False
    return bool(weight.shape[0] % COLUMN_TILES[-1] == 0)


def matmul(
    x: jax.Array,
    weight: Quantized | Stacked,
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes x · weightᵀ.

    Args:
      x: bf16 or f32[M, K].
      weight: [N, K], alone or in a stack.
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      interpret: simulates the kernel on the CPU, with its memory, threads and barriers (jax 0.11).

    Returns:
      f32[M, N].

    Raises:
      ValueError: the kernel does not serve the weight, a shape or a dtype.
    """
    check(x, taken_shapes(weight), activation)
    one = in_stack(weight)
    stack = one.stack
    if not isinstance(stack, Int4Weight | Mxfp4Weight) or not supports(one):
        raise ValueError(
            "mosaic_gpu serves Int4Weight and Mxfp4Weight without minima and with a multiple of "
            f"{COLUMN_TILES[-1]} outputs, got {type(stack).__name__} of shape {one.shape}"
        )
    m = x.shape[0]
    plan = make_plan(m, taken_shapes(one), activation, interpret)
    x = jnp.pad(x, ((0, plan.m - m), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    values, x_scales = multiplicands(x, stack.group_size, activation)
    arrays: dict[str, Any] = {
        "x": values if plan.integer else words.permute_inputs(values),
        "packed": stack.packed,
        "scales": stack.scales,
        "zeros": stack.zeros if isinstance(stack, Int4Weight) else None,
        "x_groups": _x_groups(plan, values, x_scales) if "x_groups" in plan.operands else None,
        "index": one.index[None],
    }
    parts = call(plan, *(arrays[name] for name in plan.operands), interpret=_parameters(interpret))
    total = parts[0]
    for part in range(1, plan.parts):
        total += parts[part]
    return _finish(plan, total, one, values, x_scales)[:m]


def make_plan(
    m: int, weight: Int4Weight | Mxfp4Weight, activation: Activation, interpret: bool = False
) -> Plan:
    """Plans a call with M rows. Only the tiles of M and `parts` depend on M."""
    n, blocks = weight.shape[0], weight.packed.shape[1] // PLANE
    integer, grouped = activation != "a16", weight.group_size is not None
    zeros = isinstance(weight, Int4Weight) and weight.zeros is not None
    decoder = _DECODERS[type(weight), integer]
    wanted = {
        "x": True,
        "packed": True,
        "scales": grouped,
        "zeros": zeros and (grouped or not integer),
        "x_groups": grouped and integer,
        "index": True,
    }
    group = weight.group_size or PLANE
    # A thread's registers hold the sums of all rows, and the scales of narrow groups.
    widest = min(group, 64 if zeros else 128)
    m_tile = next(tile for tile in ROW_TILES if tile >= min(m, widest))
    n_tile = next(tile for tile in COLUMN_TILES if n % tile == 0)
    rows = -(-m // m_tile)
    per_segment = _segment(n // n_tile, blocks)
    segments = -(-blocks // per_segment)
    return Plan(
        m=rows * m_tile,
        n=n,
        m_tile=m_tile,
        n_tile=n_tile,
        blocks=blocks,
        per_segment=per_segment,
        parts=segments if rows * (n // n_tile) < 2 * MULTIPROCESSORS else 1,
        group=group,
        decoder=decoder,
        operands=tuple(name for name, use in wanted.items() if use),
        exponents=isinstance(weight, Mxfp4Weight),
        interpreted=interpret,
    )


def _segment(columns: int, blocks: int) -> int:
    """Blocks per segment, by the weight's shape. A few rows still occupy the whole GPU."""
    segments = max(1, min(-(-2 * MULTIPROCESSORS // columns), blocks // MIN_SEGMENT))
    return -(-blocks // segments)


def _x_groups(plan: Plan, values: jax.Array, x_scales: jax.Array) -> jax.Array:
    """The scales and sums of x that integer products need: f32[blocks, x_rows, M]."""
    rows = [x_scales]
    if plan.zeros:
        groups = values.astype(jnp.int32).reshape(plan.m, -1, plan.group)
        rows.append(jnp.sum(groups, axis=-1).astype(jnp.float32) * plan.decoder.factor)
    blocks = [row.reshape(plan.m, plan.blocks, plan.groups) for row in rows]
    unused = plan.x_rows - plan.groups * len(rows)
    joined = jnp.pad(jnp.concatenate(blocks, axis=-1), ((0, 0), (0, 0), (0, unused)))
    return joined.transpose(1, 2, 0)


def _finish(
    plan: Plan, total: jax.Array, one: Stacked, values: jax.Array, x_scales: jax.Array
) -> jax.Array:
    """Applies the scale of a weight without groups. total: f32 or int32[M, N] -> f32[M, N]."""
    if plan.scaled:
        return total
    stack = cast(Int4Weight | Mxfp4Weight, one.stack)
    if plan.integer:
        total = total // plan.decoder.factor
        if isinstance(stack, Int4Weight) and stack.zeros is not None:
            sums = jnp.sum(values.astype(jnp.int32), axis=1, keepdims=True)
            total -= sums * stack.zeros[one.index, :, 0].astype(jnp.int32)
        total = total.astype(jnp.float32)
    scales = stack.scales[one.index, :, 0].astype(jnp.float32)
    y = total * (x_scales * scales if plan.integer else scales)
    # The barrier keeps XLA from fusing this product with an addition in some programs only.
    kept: jax.Array = lax.optimization_barrier(y)
    return kept


def _parameters(interpret: bool) -> Any:
    """Pallas's parameters for interpret mode; None without it."""
    if not interpret:
        return None
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise ValueError("interpret must be False: jax before 0.11 cannot interpret Mosaic GPU")
    return plgpu.InterpretGPUParams()
