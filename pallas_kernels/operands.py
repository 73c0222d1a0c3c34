"""Checks the operands of accelerators' matrix kernels and quantizes x for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Activation, check_activation, quantize_activations
from pallas_kernels.formats import (
    SCALE_DTYPES,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    Quantized,
    check_group_size,
    check_plain_columns,
    padded_inputs,
)
from pallas_kernels.rounding import check_float


def check(x: jax.Array, weight: Quantized, activation: Activation) -> None:
    """Raises ValueError unless x: bf16 or f32[M, K] fits the weight and nothing is empty.

    The weight's arrays must have the shapes and dtypes of its format, which kernels rely on.
    """
    check_activation(activation)
    if not isinstance(weight, Quantized):
        raise ValueError(
            f"weight must be an Int4Weight, Mxfp4Weight or Int8Weight, got {type(weight).__name__}"
        )
    n, k = weight.shape
    if x.ndim != 2 or x.shape[1] != k or 0 in (x.shape[0], n, k):
        raise ValueError(f"x of shape {x.shape} cannot be multiplied by a weight of {(n, k)}")
    check_float("x", x.dtype)
    check_group_size(weight.group_size)
    inputs = padded_inputs(k)
    _check_arrays(weight, n, inputs, inputs // (weight.group_size or inputs))


def _check_arrays(weight: Quantized, n: int, inputs: int, groups: int) -> None:
    if isinstance(weight, Int8Weight):
        _check_array("integers", weight.integers, (n, inputs), ("int8",))
    else:
        _check_array("packed", weight.packed, (n, inputs // 2), ("uint8",))
    dtypes = ("uint8",) if isinstance(weight, Mxfp4Weight) else SCALE_DTYPES
    _check_array("scales", weight.scales, (n, groups), dtypes)
    if isinstance(weight, Int8Weight) and weight.zeros is not None:
        raise ValueError("weight of 8 bits must have no zeros here, got some")
    if isinstance(weight, Int4Weight) and weight.zeros is not None:
        _check_array("zeros", weight.zeros, (n, groups), ("int8",))
    check_plain_columns(weight)


def _check_array(
    name: str, array: jax.Array, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    if array.shape != shape or array.dtype.name not in dtypes:
        raise ValueError(
            f"{name} must be {' or '.join(dtypes)}{list(shape)}, "
            f"got {array.dtype.name}{list(array.shape)}"
        )


def multiplicands(
    x: jax.Array, group_size: int | None, activation: Activation
) -> tuple[jax.Array, jax.Array]:
    """x: [M, K] -> the matrix unit's operand, int8 or bf16[M, K], and its scales, f32[M, G]."""
    if activation != "a16":
        return quantize_activations(x.astype(jnp.float32), activation, group_size)
    groups = x.shape[1] // (group_size or x.shape[1])
    return x.astype(jnp.bfloat16), jnp.ones((x.shape[0], groups), jnp.float32)


def product_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which products of operands of `dtype` are summed within a group."""
    return np.dtype(np.int32 if dtype == np.int8 else np.float32)
