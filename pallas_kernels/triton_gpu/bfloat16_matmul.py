"""The product of bfloat16 x and a bfloat16 matrix, in 16 bits or in 12, for NVIDIA GPUs from Ampere
on.

XLA's own product cannot serve here: it sums in another order for another number of rows.
`pallas_kernels.triton_gpu.segments` tells in which order this kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.operands import by_kind
from pallas_kernels.stacks import Stacked, form, in_stack
from pallas_kernels.triton_gpu.bfloat16_values import STEP, Exact, ExactTile, stored
from pallas_kernels.triton_gpu.readings import Operand, Reading
from pallas_kernels.triton_gpu.segments import Sums, launch, steps_per_segment

SHORTEST = 4  # steps of a segment; shorter sums would take longer to write than to compute


def products(
    x: jax.Array, weights: Sequence[Exact | Stacked], *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Computes x · weightᵀ for every weight. Weights of one format and equal segments share a
    kernel.

    Args:
      x: bf16[M, K].
      weights: (N, K), alone or in a stack; those of 16 bits row by row.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      f32[M, N] for every weight, with the bits that it has alone.

    Raises:
      ValueError: a shape or dtype is another one, or a weight's rows are interleaved.
    """
    for weight in weights:
        (n, k), held = weight.shape, cast(Exact, form(weight))
        narrow = isinstance(held, Bfloat12Weight)
        interleaved = not narrow and held.out_features is not None
        if interleaved or x.dtype != jnp.bfloat16 or x.shape[1:] != (k,):
            raise ValueError(
                "triton_gpu multiplies bfloat16 x by bfloat16 matrices stored row by row, "
                f"got {x.dtype.name}{list(x.shape)} and a matrix of {(n, k)}"
            )
    return tuple(each.total(x.shape[0]) for each in sums((x,), weights, interpret=interpret))


def reading(m: int, inputs: int) -> Reading:
    """How the product of M rows reads x: as it is."""
    return Reading("a16", inputs, m)


def sums(
    operand: Operand, weights: Sequence[Exact | Stacked], *, interpret: bool = False
) -> tuple[Sums, ...]:
    """Computes the segments of `products` from what `reading` says."""
    [x] = operand
    steps = pl.cdiv(x.shape[1], STEP)
    kinds = [
        (
            isinstance(form(weight), Bfloat12Weight),
            steps_per_segment(weight.shape[0], steps, SHORTEST),
        )
        for weight in weights
    ]

    def multiply(places: list[int]) -> list[Sums]:
        alike = [in_stack(weights[place]) for place in places]
        return launch(
            partial(ExactTile, inputs=x.shape[1], interpreted=interpret),
            {"x": x},
            {},
            [stored(cast(Exact, one.stack)) for one in alike],
            [one.index for one in alike],
            [one.shape[0] for one in alike],
            steps=steps,
            per_segment=kinds[places[0]][1],
            stages=3 if kinds[places[0]][0] else 4,  # in 12 bits, four programs share memory
            interpret=interpret,
        )

    return by_kind(kinds, multiply)
