"""What every accelerator kernel does before it starts: checks its operands and quantizes x."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.activations import check_activation, quantize_activations
from pallas_kernels.formats import SCALE_DTYPES, Int4Weight, check_group_size, padded_inputs


def check(x: jax.Array, weight: Int4Weight, activation: str) -> None:
    """Raises ValueError unless x: bf16 or f32[M, K] fits the weight and nothing is empty."""
    check_activation(activation)
    if not isinstance(weight, Int4Weight):
        raise ValueError(f"weight must be an Int4Weight, got {type(weight).__name__}")
    n, k = weight.shape
    if x.ndim != 2 or x.shape[1] != k or 0 in (x.shape[0], n, k):
        raise ValueError(f"x of shape {x.shape} cannot be multiplied by a weight of {(n, k)}")
    if x.dtype.name not in ("bfloat16", "float32"):
        raise ValueError(f"x must be bfloat16 or float32, got {x.dtype.name}")
    _check_storage(weight)


def _check_storage(weight: Int4Weight) -> None:
    """Raises ValueError unless the arrays are what the format says: kernels read by it."""
    check_group_size(weight.group_size)
    n, k = weight.shape
    inputs = padded_inputs(k)
    groups = inputs // (weight.group_size or inputs)
    packed, scales = weight.packed, weight.scales
    if packed.shape != (n, inputs // 2) or packed.dtype.name != "uint8":
        raise ValueError(
            f"packed must be uint8{[n, inputs // 2]}, got {packed.dtype.name}{list(packed.shape)}"
        )
    if scales.shape != (n, groups) or scales.dtype.name not in SCALE_DTYPES:
        raise ValueError(
            f"scales must be {' or '.join(SCALE_DTYPES)}{[n, groups]}, "
            f"got {scales.dtype.name}{list(scales.shape)}"
        )


def multiplicands(
    x: jax.Array, group_size: int | None, activation: str
) -> tuple[jax.Array, jax.Array]:
    """x: [M, K] -> what the matrix unit multiplies, int8 or bf16[M, K], and f32[M, groups]."""
    if activation != "a16":
        return quantize_activations(x.astype(jnp.float32), activation, group_size)
    groups = x.shape[1] // (group_size or x.shape[1])
    return x.astype(jnp.bfloat16), jnp.ones((x.shape[0], groups), jnp.float32)


def product_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which products of multiplicands of `dtype` are summed within a group."""
    return jnp.dtype(jnp.int32 if dtype == jnp.int8 else jnp.float32)
