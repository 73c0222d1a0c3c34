"""`dequantize`: a model in 16 or 32 bits with the values that its quantized weights stand for."""

from __future__ import annotations

import dataclasses
import os
import warnings
from functools import partial

import jax

from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import Bfloat16Weight, Quantized
from pallas_kernels.nested import Nested
from pallas_kernels.settings import own_settings
from pallas_kernels.weight_values import dequantize as values_of
from pallas_kernels.weight_values import plain_values
from pallas_kernels.weights import Rounded, Weight, is_format
from specjax.checks import printable
from specjax.model.params import Params, check_is_params, held, prepack, unstack_layers


def dequantize(params: Params, dtype: str | None = None) -> Params:
    """Turns a quantized model into one in 16 or 32 bits.

    A model that is in that form already is returned as it is.

    `specjax.quantize` takes the result, so that a model which was published in 4 or 8 bits can be
    cast to another format, for instance to draft for itself. Casting rounds such weights a second
    time: where the original is at hand, quantize that one.

    float32 holds the weights exactly (minima are added with one rounding). bfloat16 rounds each of
    them once more. A rotated model stays rotated.

    Args:
      params: any model on one device; matrices in 16 or 32 bits are only cast to `dtype`.
      dtype: of all weights and of activations, "bfloat16" or "float32"; None: the dtype that
        `params` computes in.

    Returns:
      The model, prepacked for this machine (`specjax.prepack`).

    Raises:
      ValueError: `dtype` is not supported, or `params` are divided over a mesh.
    """
    check_is_params(params)
    if params.mesh is not None:
        raise ValueError(
            f"params are divided over {params.mesh.shape_tuple}; dequantize a model on one device"
        )
    config = params.config
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)

    leaves = jax.tree.leaves(params, is_leaf=is_format)
    if all(_is_plain(leaf, config.dtype) for leaf in leaves):
        return prepack(dataclasses.replace(params, config=config))
    weights: Params = jax.tree.map(
        partial(_plain, dtype=config.dtype), unstack_layers(params), is_leaf=is_format
    )
    return prepack(dataclasses.replace(weights, config=config))


def warn_of_rounding_again(source: str | os.PathLike[str]) -> None:
    """Says that a model at `source` is quantized from weights that are quantized already."""
    warnings.warn(
        f"{printable(source)} is quantized already; its weights are rounded a second time, "
        "and quantizing the original loses less",
        stacklevel=2,
    )


def _plain(weight: Weight, dtype: str) -> Weight:
    if isinstance(weight, Rounded):
        values: Weight = _dequantized(weight, dtype)
        return values
    return weight if _is_plain(weight, dtype) else held(plain_values(weight), dtype)


def _is_plain(weight: Weight, dtype: str) -> bool:
    """Whether a weight, or a stack of weights, is in 16 or 32 bits already."""
    if isinstance(weight, Quantized | Bfloat12Weight | Nested):
        return False
    return dtype == ("bfloat16" if isinstance(weight, Bfloat16Weight) else weight.dtype.name)


@partial(jax.jit, static_argnames="dtype")
@own_settings()
def _dequantized(weight: Rounded, dtype: str) -> Weight:
    """Compiled, so that no matrix of float32 stands beside one of bfloat16."""
    return held(values_of(weight), dtype)
