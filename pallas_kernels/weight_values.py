"""The values of weights in every format, interleaved or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.bfloat12 import Bfloat12Weight, some_bits
from pallas_kernels.formats import (
    Bfloat16Weight,
    Int4Weight,
    Mxfp4Weight,
    Quantized,
    group_scales,
    integers,
    zero_points,
)
from pallas_kernels.interleave import by_rows, some_rows
from pallas_kernels.nested import NestedInt8Weight, NestedWeight
from pallas_kernels.planes import joined
from pallas_kernels.rounding import rounded_product
from pallas_kernels.weights import Rounded, Unquantized, Weight


def plain_values(weight: Unquantized | NestedWeight) -> Float[Array, " N *K"]:
    """The values of an unquantized weight: bf16 or f32[N, K]. Inverts `formats.plain_weight`.

    A nested weight's are those of its exact plane.
    """
    if isinstance(weight, NestedWeight):
        weight = weight.exact
    if isinstance(weight, Bfloat12Weight):
        weight = Bfloat16Weight(some_bits(weight, jnp.arange(weight.shape[0], dtype=jnp.int32)))
    weight = by_rows(weight)
    if isinstance(weight, Bfloat16Weight):
        return jax.lax.bitcast_convert_type(weight.bits, jnp.bfloat16)
    return weight


def take_rows(weight: Weight, indices: Int[Array, "*rows"]) -> Float[Array, "*rows K"]:
    """Takes rows of a matrix, such as token embeddings.

    Args:
      weight: (N, K), in any format.
      indices: int[...], in 0 … N - 1.

    Returns:
      bf16 or f32[..., K]; f32 for a quantized weight.
    """
    if isinstance(weight, jax.Array):
        return weight[indices]
    rows = some_rows(weight, indices.reshape(-1))
    values = dequantize(rows) if isinstance(rows, Rounded) else plain_values(rows)
    return values.reshape(*indices.shape, weight.shape[1])


def dequantize(weight: Weight) -> Float32[Array, "N K"]:
    """Computes the values of a weight, with columns in the order of the model's inputs.

    The values are exact for 16-bit scales. Adding minima rounds once.

    Args:
      weight: (N, K), in any format.

    Returns:
      f32[N, K].
    """
    if isinstance(weight, NestedInt8Weight):
        weight = joined(by_rows(weight))
    if not isinstance(weight, Quantized):
        return plain_values(weight).astype(jnp.float32)
    weight = by_rows(weight)
    n, k = weight.shape
    scales = group_scales(weight)[:, :, None]
    groups = integers(weight).astype(jnp.float32).reshape(n, scales.shape[1], -1)
    zeros = zero_points(weight)
    if zeros is not None:
        groups -= zeros.astype(jnp.float32)[:, :, None]
    if isinstance(weight, Mxfp4Weight) or weight.minima is None:
        groups *= scales
    else:
        minima = weight.minima.astype(jnp.float32)[:, :, None]
        groups = rounded_product(groups, scales) + minima
    values = groups.reshape(n, -1)[:, :k]
    if not isinstance(weight, Mxfp4Weight) and weight.order is not None:
        values = jnp.zeros_like(values).at[:, weight.order].set(values)
    if isinstance(weight, Int4Weight) and weight.outliers is not None:
        columns, outliers = weight.outliers.columns, weight.outliers.weight
        values = values.at[:, columns].add(dequantize(outliers))
    return values
