"""Picks the matrix kernel of a weight's format."""

from __future__ import annotations

import jax

from pallas_kernels.activations import Activation
from pallas_kernels.formats import Bfloat16Weight
from pallas_kernels.mosaic_tpu import bfloat16_matmul, quantized_matmul
from pallas_kernels.weights import Rounded


def matmul(
    x: jax.Array,
    weight: Rounded | Bfloat16Weight,
    activation: Activation = "a16",
    *,
    int8_products: bool | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes x · weightᵀ by the kernel of the weight's format; arguments as there."""
    if isinstance(weight, Bfloat16Weight):
        return bfloat16_matmul.matmul(x, weight, interpret=interpret)
    return quantized_matmul.matmul(
        x, weight, activation, int8_products=int8_products, interpret=interpret
    )
