"""Quantization of a model's weights: `quantize` and its methods.

The linear layers of the blocks are quantized and, on request, the head. Embeddings, norms and
biases stay as they are: they are small or only looked up.

Methods without data:

    rtn, rtn-clip      round to nearest, 4 bits; with a searched clip ratio per group
    int8               round to nearest, 8 bits
    nested8            8 bits whose high nibbles are a 4-bit weight that drafts
    mxfp4, mxfp4-even  cast to MXFP4

Methods with calibration text:

    gptq, gptq-clip    GPTQ; with searched clip ratios, as in QuaRot
    act-order+gptq     GPTQ in the order of the inputs' magnitudes
    awq                scales and clipping, then round to nearest
    atom               order and outliers, then round to nearest, clipped

Methods that keep a bfloat16 model exactly, head and embedding included:

    bfloat12           12 bits a weight (`pallas_kernels.bfloat12`)
    nested16           the same, and a 4-bit plane that drafts: rounded by rtn-clip, or as
                       "nested16+gptq", "nested16+mxfp4" … say

"awq+" and "quarot+" go before any rounding, "atom+" before the roundings to 4 bits. "quarot" alone
means "quarot+rtn"; "awq+gptq" rounds AWQ's scaled weights by GPTQ, and so on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from checkpoints_tools.quantization.calibration import check_tokens
from checkpoints_tools.quantization.layerwise import quantize_layers, quantized_config
from checkpoints_tools.quantization.recipe import Recipe
from specjax.model.config import ModelConfig
from specjax.model.params import Params, check_is_params, prepack_weight, stack_layers
from specjax.model.weight_names import each_weight, params_from_weights


def quantize(
    params: Params,
    method: str = "rtn",
    *,
    group_size: int | None = 128,
    bits: int = 4,
    lm_head: bool = False,
    calibration: ArrayLike | None = None,
) -> Params:
    """Quantizes a model. The copy shares an embedding and a head that are unchanged.

    The copy is prepacked for this machine, as by `specjax.prepack`.

    Args:
      params: a model in 16 or 32 bits.
      method: "rtn", "rtn-clip", "int8", "nested8", "mxfp4" or "mxfp4-even" without data; "gptq",
        "gptq-clip", "awq" or "atom" with calibration text. "quarot+", "awq+", "atom+" and
        "act-order+" go before other methods. "bfloat12" and "nested16" keep a bfloat16 model
        exactly.
      group_size: inputs per scale: 32, 64, 128 or None (one scale per output). If it does not
        divide a layer's inputs, the last group is shorter. MXFP4 always has groups of 32.
      bits: the width of the integers: 4; 3 and 2 are a narrower range in 4-bit storage, for
        experiments.
      lm_head: quantize the output projection too. If it is tied to the embedding, a quantized copy
        of the embedding becomes the head, `config.tie_word_embeddings` becomes False, and the
        look-up of tokens keeps the original embedding. The exact methods always take the head and
        the embedding, and leave them tied.
      calibration: int32[S, T], S sequences of T tokens, for the methods that need them
        (`specjax.calibration_tokens` makes them from text); None for the others.

    Returns:
      The quantized model.

    Raises:
      ValueError: the method or an option is unknown; calibration is missing, not needed, or does
        not suit the model; or `params` is quantized already (`specjax.dequantize` helps).
    """
    check_is_params(params)
    recipe = Recipe(method, group_size, bits)
    tokens = check_calibration(recipe, calibration, params.config)
    weights = quantize_layers(
        each_weight(params), params.config, recipe, lm_head=lm_head, tokens=tokens
    )
    shared = (params.embedding, params.head.weight)
    packed = {
        name: weight if any(weight is each for each in shared) else prepack_weight(weight)
        for name, weight in weights
    }
    config = quantized_config(params.config, recipe, lm_head)
    return stack_layers(params_from_weights(config, packed))


def check_calibration(
    recipe: Recipe, calibration: ArrayLike | None, config: ModelConfig
) -> np.ndarray | None:
    """`calibration` as int32[S, T] or None. Raises ValueError if the recipe needs the other."""
    if recipe.needs_calibration and calibration is None:
        raise ValueError(
            f"method {recipe.method!r} needs calibration: tokens, int32[S, T], which "
            "specjax.calibration_tokens makes of text, or --calibration FILE on the command line"
        )
    if not recipe.needs_calibration and calibration is not None:
        raise ValueError(f"method {recipe.method!r} does not use calibration; leave it out")
    return None if calibration is None else check_tokens(calibration, config)
