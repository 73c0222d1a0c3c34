"""The values that weights stand for, in every format, interleaved or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import (
    Bfloat16Weight,
    Int4Weight,
    Mxfp4Weight,
    Quantized,
    Weight,
    group_scales,
    integers,
)
from pallas_kernels.interleave import by_rows, interleaved_rows


def plain_values(weight: jax.Array | Bfloat16Weight) -> jax.Array:
    """The values of an unquantized weight: bf16 or f32[N, K]. Undoes `formats.plain_weight`."""
    weight = by_rows(weight)
    if isinstance(weight, Bfloat16Weight):
        return jax.lax.bitcast_convert_type(weight.bits, jnp.bfloat16)
    return weight


def take_rows(weight: jax.Array | Bfloat16Weight, indices: jax.Array) -> jax.Array:
    """Rows of an unquantized matrix, such as the embeddings of tokens.

    Args:
      weight: (N, K).
      indices: int[...], in 0 … N - 1.

    Returns:
      bf16 or f32[..., K].
    """
    if not isinstance(weight, Bfloat16Weight):
        return weight[indices]
    if weight.out_features is None:
        return plain_values(Bfloat16Weight(weight.bits[indices]))
    return plain_values(Bfloat16Weight(interleaved_rows(weight.bits, indices, per_word=2)))


def dequantize(weight: Weight) -> jax.Array:
    """The values that a weight stands for, its columns in the order of the model's inputs.

    They are exact for 16-bit scales.

    Args:
      weight: (N, K), in any format.

    Returns:
      f32[N, K].
    """
    if not isinstance(weight, Quantized):
        return plain_values(weight).astype(jnp.float32)
    weight = by_rows(weight)
    n, k = weight.shape
    scales = group_scales(weight)[:, :, None]
    groups = integers(weight).astype(jnp.float32).reshape(n, scales.shape[1], -1)
    if not isinstance(weight, Mxfp4Weight) and weight.zeros is not None:
        groups -= weight.zeros.astype(jnp.float32)[:, :, None]
    values = (groups * scales).reshape(n, -1)[:, :k]
    if not isinstance(weight, Mxfp4Weight) and weight.order is not None:
        values = jnp.zeros_like(values).at[:, weight.order].set(values)
    if isinstance(weight, Int4Weight) and weight.outliers is not None:
        columns, outliers = weight.outliers.columns, weight.outliers.weight
        values = values.at[:, columns].add(dequantize(outliers))
    return values
