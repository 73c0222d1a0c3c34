"""From a Hugging Face directory to the library's own checkpoint, quantized on the way.

The source is read one layer at a time and each is quantized before the next is read, so that the
whole needs the memory of the quantized model, one layer and one shard, not of the original.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
from tqdm import tqdm

from checkpoints_tools import checkpoint
from checkpoints_tools.huggingface import Checkpoint, open_checkpoint
from checkpoints_tools.quantization.layerwise import quantize_layers, quantized_config
from checkpoints_tools.quantization.recipe import Recipe
from pallas_kernels.formats import Weight
from specjax.model.config import ModelConfig
from specjax.model.params import Params, held
from specjax.model.weight_names import params_from_weights


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quantization: str | None = None,
    group_size: int | None = 128,
    lm_head: bool = False,
    dtype: str | None = None,
    progress: bool = True,
) -> None:
    """Writes the checkpoint `out` from the Hugging Face directory `source`.

    A process killed at any moment leaves `out` as it was.

    Args:
      source: a directory with config.json and safetensors.
      out: the directory to make, or a specjax checkpoint to replace.
      quantization: None to keep the weights as they are, or a method of `specjax.quantize` that
        needs no calibration, such as "rtn". Weights are quantized from the precision in which
        `source` has them.
      group_size: inputs per scale: 32, 64, 128 or None (one scale per output).
      lm_head: quantize the output projection too.
      dtype: of what is not quantized and of the activations, "bfloat16" or "float32"; None for what
        `source` says (bfloat16 for a model in float16).
      progress: show a bar with the tensors and bytes read and the memory in use.

    Raises:
      FileNotFoundError: `source` or a part of it is missing.
      ValueError: `source` is no model that can be read, `out` is something else than a checkpoint,
        or an option is unknown.
      OSError: `out` cannot be written, for instance because the disk is full.
    """
    checkpoint.check_target(out)
    recipe = None if quantization is None else Recipe(quantization, group_size)
    if recipe is not None and recipe.needs_calibration:
        raise ValueError(
            f"quantization {quantization!r} needs calibration text: use specjax quantize"
        )
    if recipe is None and lm_head:
        raise ValueError("lm_head=True needs a quantization, got None")
    original = open_checkpoint(source)
    weights: Iterator[tuple[str, Weight]] = (
        _with_progress(original) if progress else original.weights()
    )
    config = original.config
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    if recipe is not None:
        weights = quantize_layers(weights, config, recipe, lm_head=lm_head)
        config = quantized_config(config, recipe, lm_head)
    checkpoint.save(collect(weights, config, None), out, tokenizer_dir=Path(source))


def collect(
    weights: Iterator[tuple[str, Weight]], config: ModelConfig, dtype: str | None
) -> Params:
    """The model made of `weights`, those that are plain arrays rounded to the model's dtype.

    Args:
      weights: names and weights, all that `config` asks for.
      config: of the model.
      dtype: replaces the dtype of `config` unless it is None.

    Returns:
      The model.

    Raises:
      ValueError: `dtype` is not supported, or from `weights`.
    """
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    return params_from_weights(config, {name: held(w, config.dtype) for name, w in weights})


def _with_progress(original: Checkpoint) -> Iterator[tuple[str, Weight]]:
    process = psutil.Process()
    read = 0
    with tqdm(total=len(original.tensors), unit="tensor") as bar:
        for name, weight in original.weights():
            yield name, weight
            read += original.tensors[name].nbytes
            bar.set_postfix_str(
                f"read {_gigabytes(read)}, memory {_gigabytes(process.memory_info().rss)}",
                refresh=False,
            )
            bar.update()


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
