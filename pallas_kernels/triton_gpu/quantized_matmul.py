"""Matrix products for NVIDIA GPUs: any quantized weight times 16-, 8- or 4-bit x.

One Pallas kernel reads the stored weight. It names Pallas's Triton backend explicitly, which Pallas
has deprecated in favour of Mosaic GPU. Mosaic GPU has products for GPUs before Hopper only since
jax 0.11.

`pallas_kernels.reference` defines the result. Rounding differs in two places: "a16" rounds a
float32 x to bfloat16 for the tensor cores, and scales multiply group sums instead of weights. A
weight's integers (for MXFP4, twice the values) are exact in bfloat16 and in int8, so precisions
differ only in x: bfloat16, or int8 with its own scales. Zeros are subtracted exactly, from a
bfloat16 weight or from an integer product. Minima add the value of the integer zero times a group's
sum of x. The planes of an 8-bit nested weight are joined as they are read; `pallas_kernels.matmul`
passes the draft plane alone where x has 8 or 4 bits.

Summation order: a product for each group, the inputs ascending, and the order of
`pallas_kernels.triton_gpu.segments`. It depends only on the weight's shape, so a row's bits do not
depend on M.

Not implemented: tuned tiles (each MOST_ROWS of rows unpack the weight again) and a prepacked
layout. `pallas_kernels.matmul` adds outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from pallas_kernels.activations import Activation
from pallas_kernels.formats import BLOCK, Quantized, padded_inputs
from pallas_kernels.operands import by_kind, check, group_parts, group_sums
from pallas_kernels.stacks import Stacked, in_stack, taken_shapes
from pallas_kernels.triton_gpu.quantized_values import QuantizedTile, stored
from pallas_kernels.triton_gpu.readings import Operand, Reading, read
from pallas_kernels.triton_gpu.segments import ROW_TILES, Sums, launch, steps_per_segment
from pallas_kernels.weights import Rounded

MOST_ROWS = 32  # of x per program
STAGES = 3  # with more, fewer programs share a multiprocessor
SHORTEST = 2  # blocks of a segment; shorter sums would take longer to write than to compute


def products(
    x: jax.Array,
    weights: Sequence[Rounded | Stacked],
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes x · weightᵀ for every weight. Weights of one kind share a kernel: one launch.

    Args:
      x: bf16 or f32[M, K].
      weights: [N, K], alone or in a stack.
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      f32[M, N] for every weight, with the bits that it has alone.

    Raises:
      ValueError: the kernel does not serve a shape or dtype.
    """
    shapes = [taken_shapes(weight) for weight in weights]
    for one in shapes:
        check(x, one, activation, Rounded if activation == "a16" else Quantized)
    m = x.shape[0]

    def multiply(places: list[int]) -> list[jax.Array]:
        operand = read(x, reading(m, shapes[places[0]], activation), interpret=interpret)
        alike = [weights[place] for place in places]
        return [each.total(m) for each in sums(operand, alike, activation, interpret=interpret)]

    return by_kind([_kind(one, activation) for one in shapes], multiply)


def reading(m: int, weight: Rounded, activation: Activation) -> Reading:
    """How the product of M rows and a weight, whose arrays may be shapes, reads x."""
    if activation == "a16":
        return Reading(activation, weight.shape[1], m)
    minima = "minima" in group_parts(weight)
    return Reading(activation, weight.shape[1], m, group_size=weight.group_size, sums=int(minima))


def sums(
    operand: Operand,
    weights: Sequence[Rounded | Stacked],
    activation: Activation,
    *,
    interpret: bool = False,
) -> tuple[Sums, ...]:
    """Computes the segments of `products` from what `reading` says of every weight."""

    def multiply(places: list[int]) -> list[Sums]:
        alike = [in_stack(weights[place]) for place in places]
        one = cast(Rounded, alike[0].stack)
        return launch(
            partial(
                QuantizedTile, kind=type(one), group_size=one.group_size, interpreted=interpret
            ),
            *_operands(operand, one, activation),
            [stored(cast(Rounded, each.stack)) for each in alike],
            [each.index for each in alike],
            [each.shape[0] for each in alike],
            steps=_steps(taken_shapes(weights[places[0]])),
            per_segment=kinds[places[0]][-1],
            most_rows=_most_rows(one.group_size, activation),
            stages=STAGES,
            interpret=interpret,
        )

    kinds = [_kind(taken_shapes(weight), activation) for weight in weights]
    return by_kind(kinds, multiply)


def _most_rows(group_size: int | None, activation: Activation) -> int:
    """The rows of x per program. A thread's registers hold the sums of all, and of integers the
    scales of two blocks."""
    narrow = group_size is not None and group_size < 64
    return ROW_TILES[0] if narrow and activation != "a16" else MOST_ROWS


def _kind(weight: Rounded, activation: Activation) -> tuple[Any, ...]:
    """The format and the steps of a segment, the same for all weights of one kernel.

    Integers without groups are one segment, because float32 would not add their sums exactly.
    """
    parts = {name: (part.dtype, part.shape[1]) for name, part in group_parts(weight).items()}
    whole, steps = weight.group_size is None and activation != "a16", _steps(weight)
    segment = steps if whole else steps_per_segment(weight.shape[0], steps, SHORTEST)
    return type(weight), weight.group_size, tuple(parts.items()), segment


def _steps(weight: Rounded) -> int:
    return padded_inputs(weight.shape[1]) // BLOCK


def _operands(
    operand: Operand, weight: Rounded, activation: Activation
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """x in the precision of the product, [M, K], and by groups, f32[groups, M], the scales of
    integers and the sums that a weight's minima multiply."""
    minima, group_size, values = "minima" in group_parts(weight), weight.group_size, operand[0]
    if activation != "a16":
        found = operand[1]
        if not minima:
            return {"x": values}, {"x_scales": found}
        count = BLOCK // group_size if group_size else 1
        both = found.reshape(-1, 2, count, found.shape[1])
        scales, sums = (both[:, i].reshape(-1, found.shape[1]) for i in range(2))
        return {"x": values}, {"x_scales": scales, "x_sums": scales * sums}
    if not minima:
        return {"x": values}, {}
    inputs = values.shape[1]
    padded = jnp.pad(values, ((0, 0), (0, padded_inputs(inputs) - inputs)))
    return {"x": values}, {"x_sums": group_sums(padded, group_size).T}
