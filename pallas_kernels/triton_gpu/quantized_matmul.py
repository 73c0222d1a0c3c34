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
from pallas_kernels.triton_gpu.quantization import quantize
from pallas_kernels.triton_gpu.quantized_values import QuantizedTile, stored
from pallas_kernels.triton_gpu.segments import ROW_TILES, launch, steps_per_segment
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
    steps = padded_inputs(x.shape[1]) // BLOCK

    def multiply(places: list[int]) -> list[jax.Array]:
        alike = [in_stack(weights[place]) for place in places]
        one = cast(Rounded, alike[0].stack)
        return launch(
            partial(
                QuantizedTile, kind=type(one), group_size=one.group_size, interpreted=interpret
            ),
            *_operands(x, one, activation, interpret),
            [stored(cast(Rounded, each.stack)) for each in alike],
            [each.index for each in alike],
            [each.shape[0] for each in alike],
            steps=steps,
            per_segment=kinds[places[0]][-1],
            most_rows=_most_rows(one.group_size, activation),
            stages=STAGES,
            interpret=interpret,
        )

    kinds = [_kind(one, steps, activation) for one in shapes]
    return by_kind(kinds, multiply)


def _most_rows(group_size: int | None, activation: Activation) -> int:
    """The rows of x per program. A thread's registers hold the sums of all, and of integers the
    scales of two blocks."""
    narrow = group_size is not None and group_size < 64
    return ROW_TILES[0] if narrow and activation != "a16" else MOST_ROWS


def _kind(weight: Rounded, steps: int, activation: Activation) -> tuple[Any, ...]:
    """The format and the steps of a segment, the same for all weights of one kernel.

    Integers without groups are one segment, because float32 would not add their sums exactly.
    """
    parts = {name: (part.dtype, part.shape[1]) for name, part in group_parts(weight).items()}
    whole = weight.group_size is None and activation != "a16"
    segment = steps if whole else steps_per_segment(weight.shape[0], steps, SHORTEST)
    return type(weight), weight.group_size, tuple(parts.items()), segment


def _operands(
    x: jax.Array, weight: Rounded, activation: Activation, interpret: bool
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """x in the precision of the product, [M, K], and by groups, f32[groups, M], the scales of
    integers and the sums that a weight's minima multiply."""
    minima, group_size = "minima" in group_parts(weight), weight.group_size
    if activation != "a16":
        values, found = quantize(x, activation, group_size, sums=int(minima), interpret=interpret)
        if not minima:
            return {"x": values}, {"x_scales": found}
        count = BLOCK // group_size if group_size else 1
        both = found.reshape(-1, 2, count, found.shape[1])
        scales, sums = (both[:, i].reshape(-1, found.shape[1]) for i in range(2))
        return {"x": values}, {"x_scales": scales, "x_sums": scales * sums}
    values = x.astype(jnp.bfloat16)
    if not minima:
        return {"x": values}, {}
    padded = jnp.pad(values, ((0, 0), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    return {"x": values}, {"x_sums": group_sums(padded, group_size).T}
