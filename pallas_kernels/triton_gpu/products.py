"""The entry to the matrix kernels of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax

from pallas_kernels.activations import Activation
from pallas_kernels.formats import Bfloat16Weight, Quantized
from pallas_kernels.stacks import Stacked, form
from pallas_kernels.triton_gpu import bfloat16_matmul, quantized_matmul

Served = Quantized | Bfloat16Weight | Stacked


def matmul(
    x: jax.Array, weight: Served, activation: Activation = "a16", *, interpret: bool = False
) -> jax.Array:
    """Computes x · weightᵀ by the kernel of the weight's format; arguments as there."""
    return products(x, (weight,), activation, interpret=interpret)[0]


def products(
    x: jax.Array,
    weights: Sequence[Served],
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes x · weightᵀ for every weight. bfloat16 matrices share a kernel: one launch."""
    if all(isinstance(form(weight), Bfloat16Weight) for weight in weights):
        plain = cast(Sequence[Bfloat16Weight | Stacked], weights)
        return bfloat16_matmul.products(x, plain, interpret=interpret)
    if len(weights) > 1:
        return tuple(matmul(x, weight, activation, interpret=interpret) for weight in weights)
    (quantized,) = cast(Sequence[Quantized | Stacked], weights)
    return (quantized_matmul.matmul(x, quantized, activation, interpret=interpret),)
