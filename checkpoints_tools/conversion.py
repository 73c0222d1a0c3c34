"""`convert`: from a model on disk to the library's own checkpoint, quantized on the way if asked.

A Hugging Face or GGUF model is read one layer at a time, and each layer is quantized before the
next is read. The conversion needs memory for the quantized model, one layer and one shard, not for
the original. A quantization that was killed resumes (`quantization.resumable`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
from numpy.typing import ArrayLike
from tqdm import tqdm

from checkpoints_tools import checkpoint
from checkpoints_tools.lazy_checkpoint import LazyCheckpoint
from checkpoints_tools.loading import check_fits, collect, open_model, read
from checkpoints_tools.quantization import check_calibration
from checkpoints_tools.quantization.dequantization import warn_of_rounding_again
from checkpoints_tools.quantization.layerwise import quantize_layers, quantized_config
from checkpoints_tools.quantization.recipe import DEFAULT_GROUP, Recipe
from checkpoints_tools.quantization.resumable import ResumableRun, run_key
from checkpoints_tools.sources import locate
from pallas_kernels.formats import Quantized
from pallas_kernels.weights import Weight
from specjax.model.config import ModelConfig
from specjax.model.params import Params
from specjax.model.room import check_weights
from specjax.model.sizes import weight_bytes
from specjax.model.weight_names import each_weight, is_block_matrix


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quantization: str | None = None,
    group_size: int | None = DEFAULT_GROUP,
    bits: int = 4,
    lm_head: bool = False,
    dtype: str | None = None,
    calibration: ArrayLike | None = None,
    progress: bool = True,
) -> None:
    """Writes the checkpoint `out` from the model at `source`, quantized if asked.

    A process killed at any moment leaves `out` as it was. A killed quantization also leaves a
    hidden folder beside `out`, from which the next call with the same arguments resumes. Such
    folders are removed once `out` is whole.

    Args:
      source: a Hugging Face directory or a GGUF file, which are read one layer at a time; or a
        specjax checkpoint or the name of a model that ships with the library, which are held in
        memory.
      out: the directory to make, or a specjax checkpoint to replace.
      quantization: a method of `specjax.quantize`, such as "rtn", or None to keep the weights as
        they are. Weights are quantized from the precision in which `source` has them. If they are
        quantized already, they are rounded a second time, and a warning says so.
      group_size: as for `specjax.quantize`.
      bits: as for `specjax.quantize`.
      lm_head: quantize the output projection too.
      dtype: of activations and of weights that are not quantized, "bfloat16" or "float32"; None
        for the dtype of `source` (bfloat16 for a model in float16).
      calibration: int32[S, T], S sequences of T tokens, for the methods that need them
        (`specjax.calibration_tokens` makes them from text).
      progress: show a progress bar.

    Raises:
      FileNotFoundError: `source` or a part of it is missing.
      ValueError: `source` or its tokenizer cannot be read, `out` exists and is not a checkpoint, an
        option is unknown or does not suit the model, or another process is making `out`.
      OSError: `out` cannot be written, for instance because the disk is full.
    """
    target = Path(out)
    checkpoint.check_target(target)
    recipe = None if quantization is None else Recipe(quantization, group_size, bits)
    unused = lm_head or group_size != DEFAULT_GROUP or bits != 4 or calibration is not None
    if recipe is None and unused:
        raise ValueError("group_size, bits, lm_head and calibration need a quantization, got None")
    path = locate(source)
    checkpoint.check_tokenizer(path)
    if recipe is None:
        checkpoint.save(_read(path, dtype, progress), target, tokenizer_dir=path)
    else:
        _quantize(path, target, recipe, lm_head, dtype, calibration, progress)


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    method: str = "rtn",
    *,
    group_size: int | None = DEFAULT_GROUP,
    bits: int = 4,
    lm_head: bool = False,
    dtype: str | None = None,
    calibration: ArrayLike | None = None,
    progress: bool = True,
) -> None:
    """The same as `convert(source, out, quantization=method, …)`."""
    convert(
        source,
        out,
        quantization=method,
        group_size=group_size,
        bits=bits,
        lm_head=lm_head,
        dtype=dtype,
        calibration=calibration,
        progress=progress,
    )


def _quantize(
    path: Path,
    out: Path,
    recipe: Recipe,
    lm_head: bool,
    dtype: str | None,
    calibration: ArrayLike | None,
    progress: bool,
) -> None:
    config, weights = _open(path, dtype)
    tokens = check_calibration(recipe, calibration, config)
    made = quantized_config(config, recipe, lm_head)
    nbytes = weight_bytes(made, recipe.weights, group_size=recipe.group_size, lm_head=lm_head)
    check_weights(f"{path} quantized by {recipe.method}", made, nbytes)
    key = run_key(path, config, recipe, lm_head, tokens)
    with ResumableRun(out, key, config, recipe, tokens, progress, nbytes) as run:
        quantized = quantize_layers(
            _with_warning(weights, path), config, recipe,
            lm_head=lm_head, tokens=tokens, watcher=run, requantize=True,
        )  # fmt: skip
        checkpoint.save(collect(quantized, made), out, tokenizer_dir=path)


def _with_warning(
    weights: Iterable[tuple[str, Weight]], path: Path
) -> Iterator[tuple[str, Weight]]:
    """The same, with a warning at the first matrix that is rounded a second time."""
    warned = False
    for name, weight in weights:
        if is_block_matrix(name) and isinstance(weight, Quantized) and not warned:
            with tqdm.external_write_mode():  # on a line of its own, not behind the bar
                warn_of_rounding_again(path)
            warned = True
        yield name, weight


def _open(path: Path, dtype: str | None) -> tuple[ModelConfig, Iterable[tuple[str, Weight]]]:
    """The configuration and the weights of a model on disk."""
    if checkpoint.is_checkpoint(path):
        params = read(path, dtype=dtype)
        return params.config, each_weight(params)
    original = open_model(path)
    config = original.config
    return config if dtype is None else dataclasses.replace(config, dtype=dtype), original.weights()


def _read(path: Path, dtype: str | None, progress: bool) -> Params:
    """A model on disk as it is, with a bar while another program's files are read."""
    if checkpoint.is_checkpoint(path) or not progress:
        return read(path, dtype=dtype)
    original = open_model(path)
    check_fits(path, original, dtype)
    return collect(_with_progress(original), original.config, dtype)


def _with_progress(original: LazyCheckpoint) -> Iterator[tuple[str, Weight]]:
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
