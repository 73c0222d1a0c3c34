"""Picks the matrix kernel of a weight's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.activations import Activation
from pallas_kernels.operands import by_kind
from pallas_kernels.stacks import Stacked, form, taken_shapes
from pallas_kernels.triton_gpu import bfloat16_matmul, quantized_matmul
from pallas_kernels.triton_gpu.bfloat16_values import Exact
from pallas_kernels.triton_gpu.readings import Operand, Reading
from pallas_kernels.triton_gpu.segments import Sums
from pallas_kernels.weights import Rounded

Served = Rounded | Exact | Stacked


def matmul(
    x: jax.Array, weight: Served, activation: Activation = "a16", *, interpret: bool = False
) -> jax.Array:
    """Computes x · weightᵀ. The kernel of the weight's format says what the arguments mean."""
    return products(x, (weight,), activation, interpret=interpret)[0]


def products(
    x: jax.Array,
    weights: Sequence[Served],
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes x · weightᵀ for every weight. Those of one kind share a kernel: one launch."""

    def multiply(places: list[int]) -> tuple[jax.Array, ...]:
        alike: Any = [weights[place] for place in places]
        if isinstance(form(alike[0]), Exact):
            return bfloat16_matmul.products(x, alike, interpret=interpret)
        return quantized_matmul.products(x, alike, activation, interpret=interpret)

    return by_kind([isinstance(form(weight), Exact) for weight in weights], multiply)


def reading(m: int, weight: Served, activation: Activation) -> Reading:
    """How the product of M rows and a weight reads x."""
    if isinstance(form(weight), Exact):
        return bfloat16_matmul.reading(m, weight.shape[1])
    return quantized_matmul.reading(m, taken_shapes(weight), activation)


def sums(
    operand: Operand, weights: Sequence[Served], activation: Activation, *, interpret: bool = False
) -> tuple[Sums, ...]:
    """Computes the segments of `products`, for weights of which `reading` says the same."""

    def multiply(places: list[int]) -> tuple[Sums, ...]:
        alike: Any = [weights[place] for place in places]
        if isinstance(form(alike[0]), Exact):
            return bfloat16_matmul.sums(operand, alike, interpret=interpret)
        return quantized_matmul.sums(operand, alike, activation, interpret=interpret)

    return by_kind([isinstance(form(weight), Exact) for weight in weights], multiply)
