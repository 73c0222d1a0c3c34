"""Picks the matrix kernel of a weight's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.activations import Activation
from pallas_kernels.operands import Product, by_kind
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
    return _by_format(
        weights,
        lambda alike: bfloat16_matmul.products(x, alike, interpret=interpret),
        lambda alike: quantized_matmul.products(x, alike, activation, interpret=interpret),
    )


def reading(m: int, weight: Served, activation: Activation) -> Reading:
    """How the product of M rows and a weight reads x."""
    if isinstance(form(weight), Exact):
        return bfloat16_matmul.reading(m, weight.shape[1])
    return quantized_matmul.reading(m, taken_shapes(weight), activation)


def sums(
    operand: Operand, weights: Sequence[Served], activation: Activation, *, interpret: bool = False
) -> tuple[Sums, ...]:
    """Computes the segments of `products`, for weights of which `reading` says the same."""
    return _by_format(
        weights,
        lambda alike: bfloat16_matmul.sums(operand, alike, interpret=interpret),
        lambda alike: quantized_matmul.sums(operand, alike, activation, interpret=interpret),
    )


def _by_format(
    weights: Sequence[Served],
    exact: Callable[[Any], tuple[Product, ...]],
    quantized: Callable[[Any], tuple[Product, ...]],
) -> tuple[Product, ...]:
    """Calls a kernel for the 16- and 12-bit weights and one for the others."""

    def multiply(places: list[int]) -> tuple[Product, ...]:
        alike = [weights[place] for place in places]
        return (exact if isinstance(form(alike[0]), Exact) else quantized)(alike)

    return by_kind([isinstance(form(weight), Exact) for weight in weights], multiply)
