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

The tensor cores round a column alike for every N: NVIDIA's manual does not promise it, but
`benchmarks/gpu_check.py` found no exception on an H100.

Not implemented: tuned tiles, a prepacked layout, multicast of x within a cluster, and `Int8Weight`
(the Triton kernel serves it). `pallas_kernels.matmul` adds outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import words
from pallas_kernels.activations import Activation
from pallas_kernels.formats import PLANE, Int4Weight, Mxfp4Weight, Quantized
from pallas_kernels.mosaic_gpu.kernel import call
from pallas_kernels.mosaic_gpu.plan import FEW_ROWS, MULTIPROCESSORS, ROWS, Plan
from pallas_kernels.operands import by_kind, check, group_parts
from pallas_kernels.stacks import Stacked, form, in_stack, taken_shapes
from pallas_kernels.triton_gpu.readings import Operand, Reading, read
from pallas_kernels.triton_gpu.segments import Sums

FourBits = Int4Weight | Mxfp4Weight

ROW_TILES = (8, 16, 32, 64, 128)  # rows of x per work item; the smallest that fits is taken
COLUMN_TILES = (128, 64)  # outputs per work item; the largest that divides N is taken
FEW_RESIDENT = 2  # blocks of the grid per multiprocessor where few rows have tiles of 64 outputs
SEGMENT_ITEMS = MULTIPROCESSORS  # work items that a weight's segments make of one tile of rows
ITEM_COST = 1  # of an item's beginning and end, in blocks
_DECODERS = {
    (Int4Weight, False): words.INT4_BF16,
    (Int4Weight, True): words.INT4_INT8,
    (Mxfp4Weight, False): words.MXFP4_BF16,
    (Mxfp4Weight, True): words.MXFP4_INT8,
}


def supports(weight: Any) -> bool:
    """Whether `matmul` serves this weight: 4 bits, no minima, a multiple of 64 outputs."""
    held = form(weight)
    if not isinstance(held, FourBits) or "minima" in group_parts(held):
        return False
    return bool(weight.shape[0] % COLUMN_TILES[-1] == 0)


def matmul(
    x: jax.Array,
    weight: Quantized | Stacked,
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes x · weightᵀ; arguments as in `products`."""
    return products(x, (weight,), activation, interpret=interpret)[0]


def products(
    x: jax.Array,
    weights: Sequence[Quantized | Stacked],
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes x · weightᵀ for every weight. Weights of one kind share a kernel: one launch.

    Args:
      x: bf16 or f32[M, K].
      weights: [N, K], alone or in a stack.
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      interpret: simulates the kernel on the CPU, with its memory, threads and barriers (jax 0.11).

    Returns:
      f32[M, N] for every weight, with the bits that it has alone.

    Raises:
      ValueError: the kernel does not serve a weight, a shape or a dtype.
    """
    shapes = [taken_shapes(weight) for weight in weights]
    for one in shapes:
        check(x, one, activation)
        if not supports(one):
            raise ValueError(
                "mosaic_gpu serves Int4Weight and Mxfp4Weight without minima and with a multiple "
                f"of {COLUMN_TILES[-1]} outputs, got {type(one).__name__} of shape {one.shape}"
            )

    m = x.shape[0]

    def multiply(places: list[int]) -> list[jax.Array]:
        operand = read(x, reading(m, shapes[places[0]], activation), interpret=interpret)
        alike = [weights[place] for place in places]
        return [each.total(m) for each in sums(operand, alike, activation, m, interpret=interpret)]

    return by_kind([_kind(one) for one in shapes], multiply)


def reading(m: int, weight: FourBits | Stacked, activation: Activation) -> Reading:
    """How the product of M rows and a weight, whose arrays may be shapes, reads x."""
    weight = cast(FourBits, taken_shapes(weight))
    plan, k = make_plan(m, [weight], activation), weight.shape[1]
    if not plan.integer:
        return Reading(activation, k, plan.m, padded=True, permuted=True)
    grouped = "x_groups" in plan.of_x
    return Reading(
        activation, k, plan.m, group_size=weight.group_size,
        per_block=plan.x_rows if grouped else None,
        sums=plan.decoder.factor if grouped and plan.zeros else 0,
    )  # fmt: skip


def sums(
    operand: Operand,
    weights: Sequence[Quantized | Stacked],
    activation: Activation,
    m: int,
    *,
    interpret: bool = False,
) -> tuple[Sums, ...]:
    """Computes the segments of `products` of M rows from what `reading` says of every weight."""

    def multiply(places: list[int]) -> list[Sums]:
        alike = [in_stack(weights[place]) for place in places]
        return _alike(operand, alike, activation, m, interpret)

    return by_kind([_kind(taken_shapes(weight)) for weight in weights], multiply)


def _kind(weight: FourBits) -> tuple[Any, ...]:
    """The format and the segments, which are the same for all weights of one kernel."""
    parts = {name: (part.dtype, part.shape[1]) for name, part in group_parts(weight).items()}
    n, blocks = weight.shape[0], weight.packed.shape[1] // PLANE
    return type(weight), weight.group_size, tuple(parts.items()), _segment(n, blocks)


def _alike(
    operand: Operand, ones: Sequence[Stacked], activation: Activation, m: int, interpret: bool
) -> list[Sums]:
    """Multiplies x by weights of one kind, in one kernel."""
    stacks = [cast(FourBits, one.stack) for one in ones]
    plan = make_plan(m, [taken_shapes(one) for one in ones], activation, interpret)
    of_x = {"x": operand[0]}
    if "x_groups" in plan.of_x:
        of_x["x_groups"] = operand[1].reshape(plan.blocks, plan.x_rows, plan.m)
    of_weights = [
        {"packed": stack.packed, "index": one.index[None], **group_parts(stack)}
        for one, stack in zip(ones, stacks, strict=True)
    ]
    parts = call(
        plan,
        *(of_x[name] for name in plan.of_x),
        *(arrays[name] for arrays in of_weights for name in plan.of_weight),
        interpret=_parameters(interpret),
    )
    found = [Sums(each, 0, n) for each, n in zip(parts, plan.outputs, strict=True)]
    if plan.scaled:
        return found
    totals = [each.total(plan.m) for each in found]
    finished = [_finish(plan, each, one, operand) for each, one in zip(totals, ones, strict=True)]
    return [Sums(each[None], 0, n) for each, n in zip(finished, plan.outputs, strict=True)]


def make_plan(
    m: int, weights: Sequence[FourBits], activation: Activation, interpret: bool = False
) -> Plan:
    """Plans a call with M rows. Only the tiles of M and `parts` depend on M.

    weights: of one kind (`_kind`); their arrays may be shapes.
    """
    outputs, weight = tuple(each.shape[0] for each in weights), weights[0]
    blocks = weight.packed.shape[1] // PLANE
    integer, grouped = activation != "a16", weight.group_size is not None
    zeros = isinstance(weight, Int4Weight) and weight.zeros is not None
    decoder = _DECODERS[type(weight), integer]
    of_x = {"x": True, "x_groups": grouped and integer}
    of_weight = {
        "packed": True,
        "index": True,
        "scales": grouped,
        "zeros": zeros and (grouped or not integer),
    }
    group = weight.group_size or PLANE
    # A thread's registers hold the sums of all rows, and the scales of narrow groups.
    widest = min(group, 64 if zeros else 128)
    m_tile = next(tile for tile in ROW_TILES if tile >= min(m, widest))
    rows, few = -(-m // m_tile), m_tile <= FEW_ROWS
    n_tile = _widest(outputs)
    per_segment = _segment(outputs[0], blocks)
    resident = FEW_RESIDENT if few and n_tile == ROWS else 1
    return Plan(
        m=rows * m_tile,
        outputs=outputs,
        m_tile=m_tile,
        n_tile=n_tile,
        blocks=blocks,
        per_segment=per_segment,
        parts=_parts(rows * (sum(outputs) // n_tile), blocks, per_segment, resident),
        group=group,
        decoder=decoder,
        of_x=tuple(name for name, use in of_x.items() if use),
        of_weight=tuple(name for name, use in of_weight.items() if use),
        resident=resident,
        exponents=isinstance(weight, Mxfp4Weight),
        interpreted=interpret,
    )


def _widest(outputs: Sequence[int]) -> int:
    """The widest tile that divides the outputs of every weight."""
    return next(tile for tile in COLUMN_TILES if all(each % tile == 0 for each in outputs))


def _segment(n: int, blocks: int) -> int:
    """Blocks per segment, by the weight's shape. A few rows still occupy the whole GPU."""
    columns = n // _widest((n,))
    segments = max(1, min(-(-SEGMENT_ITEMS // columns), blocks))
    return -(-blocks // segments)


def _parts(tiles: int, blocks: int, per_segment: int, resident: int) -> int:
    """Work items per tile: all segments in one, or one each if that is done sooner."""
    segments = -(-blocks // per_segment)

    def cost(parts: int, steps: int) -> int:
        return -(-tiles * parts // (MULTIPROCESSORS * resident)) * (steps + ITEM_COST)

    return segments if cost(segments, per_segment) < cost(1, blocks) else 1


def _finish(plan: Plan, total: jax.Array, one: Stacked, operand: Operand) -> jax.Array:
    """Applies the scale of a weight without groups. total: f32 or int32[M, N] -> f32[M, N]."""
    stack = cast(FourBits, one.stack)
    scales = stack.scales[one.index, :, 0].astype(jnp.float32)
    if plan.integer:
        values, x_scales = operand
        total = total // plan.decoder.factor
        if isinstance(stack, Int4Weight) and stack.zeros is not None:
            row_sums = jnp.sum(values.astype(jnp.int32), axis=1, keepdims=True)
            total -= row_sums * stack.zeros[one.index, :, 0].astype(jnp.int32)
        total, scales = total.astype(jnp.float32), x_scales.T * scales
    # The barrier keeps XLA from fusing this product with an addition in some programs only.
    kept: jax.Array = lax.optimization_barrier(total * scales)
    return kept


def _parameters(interpret: bool) -> Any:
    """Pallas's parameters for interpret mode; None without it."""
    if not interpret:
        return None
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise ValueError("interpret must be False: jax before 0.11 cannot interpret Mosaic GPU")
    return plgpu.InterpretGPUParams()
