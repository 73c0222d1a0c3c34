"""The entry to the matrix kernels of this package."""

from __future__ import annotations

from typing import cast

import jax

from pallas_kernels.activations import Activation
from pallas_kernels.formats import Bfloat16Weight, Quantized
from pallas_kernels.stacks import Stacked, form
from pallas_kernels.triton_gpu import bfloat16_matmul, quantized_matmul


def matmul(
    x: jax.Array,
    weight: Quantized | Bfloat16Weight | Stacked,
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes x · weightᵀ by the kernel of the weight's format; arguments as there."""
    if isinstance(form(weight), Bfloat16Weight):
        plain = cast(Bfloat16Weight | Stacked, weight)
        return bfloat16_matmul.matmul(x, plain, interpret=interpret)
    quantized = cast(Quantized | Stacked, weight)
    return quantized_matmul.matmul(x, quantized, activation, interpret=interpret)
