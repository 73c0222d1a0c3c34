"""All forms that a weight may have, and questions that each of them answers."""

from __future__ import annotations

import jax

from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import Bfloat16Weight, Quantized
from pallas_kernels.nested import Nested, NestedInt8Weight

Rounded = Quantized | NestedInt8Weight
Unquantized = jax.Array | Bfloat16Weight | Bfloat12Weight
Weight = Unquantized | Quantized | Nested


def is_format(value: object) -> bool:
    """Whether a value is a weight in one of the formats, not an array or another tree."""
    return isinstance(value, Bfloat16Weight | Bfloat12Weight | Quantized | Nested)


def has_cheap_reading(weight: Weight) -> bool:
    """Whether products may take 8- or 4-bit activations: the weight is quantized or nested."""
    return isinstance(weight, Quantized | Nested)


def check_plain_columns(weight: Weight) -> None:
    """Raises ValueError for a weight with outliers or an order, which only `matmul` handles."""
    for name in ("outliers", "order"):
        if getattr(weight, name, None) is not None:
            raise ValueError(
                f"weight must have no {name} here, got some; pallas_kernels.matmul handles it"
            )
