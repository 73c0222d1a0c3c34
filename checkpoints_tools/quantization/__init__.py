"""Quantization of a model's weights: `quantize` and the methods it knows.

What is quantized are the linear layers of the blocks and, on request, the head. Embeddings, norms
and biases stay as they are: they are small or only looked up.

Without data: "rtn" (round to nearest), "rtn-clip" (with a searched clip ratio per group), "int8",
"mxfp4" and "mxfp4-even". With calibration text: "gptq", "gptq-clip" (with searched clip ratios, as
in QuaRot), "act-order+gptq", "awq" (scales and
clipping, then round to nearest) and "atom" (order and outliers, then round to nearest, clipped).
"awq+" and "quarot+" go before any rounding, "atom+" before those to 4 bits: "quarot" alone is
"quarot+rtn", "awq+gptq" rounds AWQ's scaled weights by GPTQ, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from checkpoints_tools.quantization.calibration import check_tokens
from checkpoints_tools.quantization.layerwise import quantize_layers, quantized_config
from checkpoints_tools.quantization.recipe import Recipe
from specjax.model.config import ModelConfig
from specjax.model.params import Params, prepack_weight
from specjax.model.weight_names import named_weights, params_from_weights


def quantize(
    params: Params,
    method: str = "rtn",
    *,
    group_size: int | None = 128,
    bits: int = 4,
    lm_head: bool = False,
    calibration: Any = None,
) -> Params:
    """A quantized copy of a model that shares every array it does not change with the original.

    What is quantized is prepacked for this machine, as `specjax.prepack` does it.

    Args:
      params: a model in 16 or 32 bits.
      method: what to do; see above.
      group_size: inputs per scale: 32, 64, 128 or None (one scale per output). Where it does not
        divide a layer's inputs, the last group is shorter. MXFP4 has groups of 32 always.
      bits: of the integers: 4; 3 and 2 are a narrower range in 4-bit storage, for experiments.
      lm_head: quantize the output projection too. Where the embedding serves as the head (tied), a
        quantized copy of it becomes the head and `config.tie_word_embeddings` becomes False: the
        look-up of tokens keeps the original embedding.
      calibration: int32[S, T], S sequences of T tokens (`calibration_tokens` makes them of text),
        for the methods that need them; None for the others.

    Returns:
      The quantized model.

    Raises:
      ValueError: an unknown method or option, calibration that is missing, not needed or does not
        suit the model, or `params` is quantized already.
    """
    recipe = Recipe(method, group_size, bits)
    tokens = check_calibration(recipe, calibration, params.config)
    original = named_weights(params)
    weights = quantize_layers(
        original.items(), params.config, recipe, lm_head=lm_head, tokens=tokens
    )
    packed = {
        name: weight if weight is original.get(name) else prepack_weight(weight)
        for name, weight in weights
    }
    return params_from_weights(quantized_config(params.config, recipe, lm_head), packed)


def check_calibration(recipe: Recipe, calibration: Any, config: ModelConfig) -> np.ndarray | None:
    """`calibration` as int32[S, T], or None. Raises ValueError unless the recipe wants it so."""
    if recipe.needs_calibration and calibration is None:
        raise ValueError(f"method {recipe.method!r} needs calibration: tokens, int32[S, T]")
    if not recipe.needs_calibration and calibration is not None:
        raise ValueError(f"method {recipe.method!r} uses no calibration; leave it out")
    return None if calibration is None else check_tokens(calibration, config)
