"""The entry to the matrix kernels of this package."""

from __future__ import annotations

import jax

from pallas_kernels.activations import Activation
from pallas_kernels.formats import Bfloat16Weight, Quantized
from pallas_kernels.triton_gpu import bfloat16_matmul, quantized_matmul


def matmul(
    x: jax.Array,
    weight: Quantized | Bfloat16Weight,
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes x · weightᵀ by the kernel of the weight's format; arguments as there."""
    if isinstance(weight, Bfloat16Weight):
        return bfloat16_matmul.matmul(x, weight, interpret=interpret)
    return quantized_matmul.matmul(x, weight, activation, interpret=interpret)
