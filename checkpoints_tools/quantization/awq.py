"""AWQ's scales (Lin et al. 2023, section 3.2): inputs of large magnitude get finer weights.

    y = W x = (W · diag(s)) (x / s),   s = magnitude^ratio

Column j of W is multiplied by s[j] before it is quantized, and the layer that computes x is divided
by s[j], so nothing runs online. For q, k, v and for gate, up that layer is the norm before them;
for o and down it is the rows of v and of up. All layers that read the same x have one ratio, out of
0, 0.05 … 0.95: the ratio whose rounding has the smallest output error,
E[|(W - Q(W · diag(s)) / s) x|²]. Ratio 0 means no scaling, so this error is never larger than that
of rounding alone.

With grouped queries, v has fewer rows than o has inputs, and o stays as it is, as in the authors'
code. In a rotated model (`ModelConfig.hadamard`), a rotation stands between v and o and between up
and down, so only the norms take scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from checkpoints_tools.quantization.calibration import InputStatistics, LayerStatistics
from pallas_kernels.rounding import round_to
from pallas_kernels.weight_values import dequantize
from pallas_kernels.weights import Rounded
from specjax.model.config import ModelConfig
from specjax.model.layers import Layer, Linear

RATIOS = tuple(i / 20 for i in range(20))
_FLOOR = 1e-4  # of magnitude^ratio, so that an input that is always zero has a scale

Rounding = Callable[[jax.Array], Rounded]


def scale_layer(
    layer: Layer, statistics: LayerStatistics, rounding: Rounding, config: ModelConfig
) -> tuple[Layer, LayerStatistics]:
    """Moves scales into the columns of a layer's weights. The layer's function stays the same.

    Args:
      layer: float32 weights.
      statistics: those of the unscaled layer, by the linear layers' names.
      rounding: how the weights will be rounded: f32[N, K] -> a quantized weight.
      config: the model's.

    Returns:
      The scaled layer, its norms rounded to the model's dtype, and the statistics of its inputs.
    """
    for norm, readers in (("attention_norm", ("q", "k", "v")), ("mlp_norm", ("gate", "up"))):
        wanted = _best_scales(layer, readers, statistics[readers[0]], rounding)
        after, scales = _divided_norm(getattr(layer, norm), wanted, jnp.dtype(config.dtype))
        layer, statistics = _scale_columns(layer, statistics, readers, scales)
        layer = _replaced(layer, norm, after)
    for writer, reader in () if config.hadamard else (("v", "o"), ("up", "down")):
        rows, columns = getattr(layer, writer), getattr(layer, reader)
        if rows.weight.shape[0] == columns.weight.shape[1]:
            scales = _best_scales(layer, (reader,), statistics[reader], rounding)
            layer, statistics = _scale_columns(layer, statistics, (reader,), scales)
            layer = _replaced(layer, writer, _divide_rows(rows, scales))
    return layer, statistics


def errors_of_ratios(
    weight: Float32[Array, "N K"], statistics: InputStatistics, rounding: Rounding
) -> Float32[Array, " ratios"]:
    """E[|(W - Q(W · diag(s)) / s) x|²] for the scales of every ratio: f32[ratios].

    weight: f32[N, K].
    """
    errors = []
    for ratio in RATIOS:
        scales = scales_of_ratio(statistics.magnitude, ratio)
        rounded = dequantize(rounding(weight * scales)) / scales
        errors.append(_output_error(weight - rounded, statistics.second_moment))
    return jnp.stack(errors)


def scales_of_ratio(magnitude: Float32[Array, " K"], ratio: float) -> Float32[Array, " K"]:
    """magnitude^ratio, normalized so that the largest times the smallest scale is 1: f32[K]."""
    scales = jnp.maximum(magnitude**ratio, _FLOOR)
    return scales / jnp.sqrt(jnp.max(scales) * jnp.min(scales))


def _best_scales(
    layer: Layer, readers: tuple[str, ...], statistics: InputStatistics, rounding: Rounding
) -> jax.Array:
    """The scales with the smallest error summed over all readers: f32[K]."""
    weights = (getattr(layer, name).weight for name in readers)
    errors = sum(errors_of_ratios(weight, statistics, rounding) for weight in weights)
    return scales_of_ratio(statistics.magnitude, RATIOS[int(jnp.argmin(errors))])


@jax.jit
def _output_error(difference: jax.Array, second_moment: jax.Array) -> jax.Array:
    """tr(D · E[x xᵀ] · Dᵀ). f32[N, K], f32[K, K] -> f32."""
    return jnp.vdot(jnp.matmul(difference, second_moment, precision="highest"), difference)


def _divided_norm(
    norm: jax.Array, scales: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """norm / scales in the model's dtype, and the scales after this rounding: f32[D]."""
    before = round_to(norm, dtype).astype(jnp.float32)
    after = round_to(before / scales, dtype)
    divisor = after.astype(jnp.float32)
    return after, jnp.where(divisor == 0, 1, before / jnp.where(divisor == 0, 1, divisor))


def _scale_columns(
    layer: Layer, statistics: LayerStatistics, readers: tuple[str, ...], scales: jax.Array
) -> tuple[Layer, LayerStatistics]:
    """Multiplies the readers' columns by the scales and divides their inputs' statistics."""
    divided = statistics[readers[0]].divided(scales)
    scaled = {
        name: dataclasses.replace(linear, weight=linear.weight * scales)
        for name in readers
        for linear in (getattr(layer, name),)
    }
    return dataclasses.replace(layer, **scaled), statistics | dict.fromkeys(readers, divided)


def _replaced(layer: Layer, field: str, value: Any) -> Layer:
    return dataclasses.replace(layer, **{field: value})


def _divide_rows(linear: Linear, scales: jax.Array) -> Linear:
    bias = None if linear.bias is None else linear.bias / scales
    return Linear(cast(jax.Array, linear.weight) / scales[:, None], bias)
