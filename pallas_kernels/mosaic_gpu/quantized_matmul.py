"""W4A16, W4A8 and W4A4 for Hopper GPUs, by Pallas Mosaic GPU.

The meaning is that of `pallas_kernels.reference`, with two differences of rounding: "a16" rounds a
float32 x to bfloat16 for the tensor cores, and the scale multiplies a group's sum, not every
weight. Scaling the sum keeps every product exact (a weight's integer times a bfloat16 has 12 bits),
lets all precisions share one kernel, and costs one operation per output and group, against two or
three per weight for unpacking. Hopper multiplies no 4-bit integers: "a4" is "a8" on a coarser grid.

**Batch invariance.** A row's bits do not depend on M:

- The inputs fall into segments (`_segment`), a segment into groups, by the weight's shape alone.
- A group's product is a fixed sequence of `wgmma` with 16 (bf16) or 32 (int8) inputs each, k
  ascending. M chooses the instruction's N, so how many independent columns ride along, not the
  order in which one column is summed. (Integers are exact in any order.)
- Group sums are added by explicit fused multiply-adds, so no compiler decides between one rounding
  and two; segments' sums by plain additions, from the left, inside the kernel or after it.

That an instruction's N does not change a column's rounding is what the tensor cores are expected to
do, not what their manual promises. No Hopper GPU was at hand to see it.

Left out: tiles chosen by measurement, a prepacked layout, multicast of x within a cluster,
`Int8Weight` (not a matter of unpacking: the Triton kernel serves it), outliers
(`pallas_kernels.matmul` adds them).
"""

from __future__ import annotations

from typing import Any

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

ROW_TILES = (8, 16, 32, 64, 128)  # rows of x in one item of work, the narrowest that holds all
COLUMN_TILES = (128, 64)  # outputs, the widest that divides N
MIN_SEGMENT = 4  # blocks: shorter sums would cost more to write than to compute
_DECODERS = {
    (Int4Weight, False): words.INT4_BF16,
    (Int4Weight, True): words.INT4_INT8,
    (Mxfp4Weight, False): words.MXFP4_BF16,
    (Mxfp4Weight, True): words.MXFP4_INT8,
}


def supports(weight: Any) -> bool:
    """Whether `matmul` takes this weight: 4 bits, no minima, a multiple of 64 outputs."""
    if not isinstance(weight, Int4Weight | Mxfp4Weight) or "minima" in group_parts(weight):
        return False
    return weight.shape[0] % COLUMN_TILES[-1] == 0


def matmul(
    x: jax.Array, weight: Quantized, activation: Activation = "a16", *, interpret: bool = False
) -> jax.Array:
    """x: bf16 or f32[M, K] times weight: [N, K] -> f32[M, N].

    Args:
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      interpret: runs the kernel on the CPU, its memory, threads and barriers simulated (jax 0.11).

    Raises:
      ValueError: a weight, shape or dtype that the kernel does not serve.
    """
    check(x, weight, activation)
    if not isinstance(weight, Int4Weight | Mxfp4Weight) or not supports(weight):
        raise ValueError(
            "mosaic_gpu serves Int4Weight and Mxfp4Weight without minima and with a multiple of "
            f"{COLUMN_TILES[-1]} outputs, got {type(weight).__name__} of shape {weight.shape}"
        )
    m = x.shape[0]
    plan = make_plan(m, weight, activation, interpret)
    x = jnp.pad(x, ((0, plan.m - m), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    values, x_scales = multiplicands(x, weight.group_size, activation)
    arrays: dict[str, Any] = {
        "x": values if plan.integer else words.permute_inputs(values),
        "packed": weight.packed,
        "scales": weight.scales,
        "zeros": weight.zeros if isinstance(weight, Int4Weight) else None,
        "x_groups": _x_groups(plan, values, x_scales) if "x_groups" in plan.operands else None,
    }
    parts = call(plan, *(arrays[name] for name in plan.operands), interpret=_parameters(interpret))
    total = parts[0]
    for part in range(1, plan.parts):
        total += parts[part]
    return _finish(plan, total, weight, values, x_scales)[:m]


def make_plan(
    m: int, weight: Int4Weight | Mxfp4Weight, activation: Activation, interpret: bool = False
) -> Plan:
    """How a call of M rows runs. Only tiles of M and `parts` depend on M."""
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
    }
    group = weight.group_size or PLANE
    # More rows need a thread's registers for sums; the scales of narrow groups need them too.
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
    """Blocks per segment, by the weight's shape: enough segments to occupy a GPU with few rows."""
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
    plan: Plan, total: jax.Array, weight: Quantized, values: jax.Array, x_scales: jax.Array
) -> jax.Array:
    """The one scale of a weight without groups. total: f32 or int32[M, N] -> f32[M, N]."""
    if plan.scaled:
        return total
    if plan.integer:
        total = total // plan.decoder.factor
        if isinstance(weight, Int4Weight) and weight.zeros is not None:
            sums = jnp.sum(values.astype(jnp.int32), axis=1, keepdims=True)
            total -= sums * weight.zeros[:, 0].astype(jnp.int32)
        total = total.astype(jnp.float32)
    scales = weight.scales[:, 0].astype(jnp.float32)
    y = total * (x_scales * scales if plan.integer else scales)
    # Keeps the compiler from fusing this product with an addition in one program only.
    kept: jax.Array = lax.optimization_barrier(y)
    return kept


def _parameters(interpret: bool) -> Any:
    """Pallas's parameter for interpret mode."""
    if not interpret:
        return None
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise ValueError("interpret must be False: jax before 0.11 cannot interpret Mosaic GPU")
    return plgpu.InterpretGPUParams()
