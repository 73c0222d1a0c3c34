"""Atom's mixed precision (Zhao et al. 2023, sections 4.1 and 4.2).

The inputs of the largest magnitude are kept at 8 bits. The others are sorted by magnitude, so that
inputs which share a scale are alike. Magnitude is E[x²], the diagonal of the second moment.

A weight stores its columns in sorted order, and x is gathered into that order online. For `down`,
the order moves into the rows of gate and up instead. Weights are clipped to 0.85 of their group's
largest magnitude, the authors' ratio, whether they are rounded to nearest or by GPTQ.

A layer has 128 inputs at 8 bits, but at most one in sixteen: 128 of the 256 inputs of a small model
would amount to 6-bit quantization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from checkpoints_tools.quantization.calibration import InputStatistics, LayerStatistics
from checkpoints_tools.quantization.rtn import round_to_nearest
from pallas_kernels.formats import Int4Weight, Int8Weight, Outliers, Quantized
from pallas_kernels.weight_values import plain_values
from pallas_kernels.weights import Rounded
from specjax.model.layers import Layer, Linear

OUTLIERS = 128
OUTLIER_SHARE = 16  # at most one input in 16
WEIGHT_CLIP = 0.85

Rounding = Callable[[jax.Array, InputStatistics], Quantized]


def mix_precisions(
    weight: Float[Array, "N K"], statistics: InputStatistics, rounding: Rounding
) -> Int4Weight:
    """Quantizes a weight: columns of large inputs to 8 bits, the others in ascending order.

    Args:
      weight: bf16, f16 or f32[N, K].
      statistics: its inputs'.
      rounding: rounds the 4-bit columns. It is called with f32[N, K] and statistics, both in the
        stored order, with zeros for the outliers.

    Returns:
      The quantized weight.
    """
    order = ascending_order(statistics)
    count = outlier_count(len(order))
    first = len(order) - count
    values = weight.astype(jnp.float32)[:, order]
    stored = rounding(values.at[:, first:].set(0), _without(statistics.take(order), first))
    assert isinstance(stored, Int4Weight)
    outliers = None
    if count:
        outer = round_to_nearest(values[:, first:], None, bits=8)
        assert isinstance(outer, Int8Weight)
        outliers = Outliers(order[first:], outer)
    return dataclasses.replace(
        stored, outliers=outliers, order=None if _is_sorted(order) else order
    )


def sort_hidden(layer: Layer, statistics: LayerStatistics) -> tuple[Layer, LayerStatistics]:
    """Sorts a layer's hidden features, the inputs of down. The layer's function stays the same."""
    order = ascending_order(statistics["down"])
    layer = dataclasses.replace(
        layer,
        gate=_take_rows(layer.gate, order),
        up=_take_rows(layer.up, order),
        down=dataclasses.replace(layer.down, weight=_values(layer.down)[:, order]),
    )
    return layer, statistics | {"down": statistics["down"].take(order)}


def ascending_order(statistics: InputStatistics) -> Int32[Array, " K"]:
    """int32[K]: the inputs from the smallest E[x²] to the largest, by a stable sort."""
    return jnp.argsort(jnp.diagonal(statistics.second_moment), stable=True).astype(jnp.int32)


def outlier_count(k: int) -> int:
    """The number of inputs, out of k, that are kept at 8 bits."""
    return min(OUTLIERS, k // OUTLIER_SHARE)


def _without(statistics: InputStatistics, first: int) -> InputStatistics:
    """The statistics seen by the 4-bit columns: the inputs from `first` on are zero."""
    return InputStatistics(
        statistics.second_moment.at[first:].set(0).at[:, first:].set(0),
        statistics.magnitude.at[first:].set(0),
    )


def _is_sorted(order: jax.Array) -> bool:
    return bool(np.array_equal(order, np.arange(len(order))))


def _take_rows(linear: Linear, order: jax.Array) -> Linear:
    bias = None if linear.bias is None else linear.bias[order]
    return Linear(_values(linear)[order], bias)


def _values(linear: Linear) -> jax.Array:
    assert not isinstance(linear.weight, Rounded)
    return plain_values(linear.weight)
