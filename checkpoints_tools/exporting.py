"""From a model to a Hugging Face directory that other projects read.

Quantized layers are written in the format of the package compressed-tensors (`pack-quantized`, and
`mxfp4-pack-quantized` for MXFP4), which transformers and vLLM load. All other weights are written
as plain safetensors. Integers, zeros and scales are written unchanged, so reading the directory
again gives the same bits.

compressed-tensors cannot represent outlier columns, columns in another order, a last group that is
shorter than the others, or rotated models. Such models are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import save_file

from checkpoints_tools import checkpoint
from checkpoints_tools.huggingface import their_name
from checkpoints_tools.huggingface_config import write_config
from checkpoints_tools.prequantized.layout import groups, pack_integers, unsigned
from pallas_kernels.formats import Int4Weight, Int8Weight, Mxfp4Weight, Quantized, integers, unpack
from pallas_kernels.interleave import by_rows
from pallas_kernels.planes import in_one_plane
from pallas_kernels.weight_values import plain_values
from pallas_kernels.weights import Rounded, Weight
from specjax.files.atomic_directory import check_new, replacing
from specjax.model.params import Params, check_is_params
from specjax.model.weight_names import HEAD, is_block_matrix, named_weights

SHARD_BYTES = 2_000_000_000
INTEGERS, MXFP4 = "pack-quantized", "mxfp4-pack-quantized"


def export(
    params: Params,
    path: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model as a Hugging Face directory, whole or not at all.

    Args:
      params: a model, quantized or not.
      path: the directory to make.
      tokenizer_dir: as in `specjax.save`.
      shard_bytes: the most bytes of weights per file; a larger weight has a file of its own.

    Raises:
      ValueError: `path` exists, compressed-tensors cannot represent a weight, or config.json
        cannot describe the model.
      OSError: `path` cannot be written; nothing is left there.
    """
    check_is_params(params)
    weights = named_weights(params)
    forms = {name: jax.eval_shape(_in_one_plane, weight) for name, weight in weights.items()}
    for name, form in forms.items():
        _check(name, form)
    fields = write_config(params.config)
    quantization = _quantization_config(forms)
    if quantization is not None:
        fields["quantization_config"] = quantization
    with replacing(Path(path), check_new, params.nbytes) as directory:
        if tokenizer_dir is not None:
            checkpoint.copy_tokenizer(tokenizer_dir, directory)
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        _write_weights(weights, directory, shard_bytes)


def _in_one_plane(weight: Weight) -> Weight:
    """The weight as it is written: a quantized one row by row, and in one plane."""
    return in_one_plane(by_rows(weight)) if isinstance(weight, Rounded) else weight


def _check(name: str, weight: Weight) -> None:
    """Raises ValueError if compressed-tensors cannot represent a weight."""
    if not isinstance(weight, Quantized):
        return
    if name == "embedding":
        reason = "is looked up by rows, and only linear layers are quantized there"
    elif isinstance(weight, Int4Weight) and weight.outliers is not None:
        reason = "has outlier columns"
    elif not isinstance(weight, Mxfp4Weight) and weight.minima is not None:
        reason = "has minima, where the format has integer zeros"
    elif not isinstance(weight, Mxfp4Weight) and weight.order is not None:
        reason = "has its columns in another order than the inputs"
    elif weight.in_features % (weight.group_size or 1):
        reason = (
            f"has {weight.in_features} inputs, not a multiple of group_size {weight.group_size}"
        )
    else:
        return
    raise ValueError(f"compressed-tensors cannot represent the weight {name}: it {reason}")


class _Scheme(NamedTuple):
    """How a layer is quantized, as config.json describes it."""

    format: str
    bits: int
    group_size: int | None
    symmetric: bool

    def of(self, targets: list[str]) -> dict[str, Any]:
        """A group of layers as an entry of compressed-tensors' `config_groups`."""
        return {
            "targets": targets,
            "format": self.format,
            "weights": {
                "num_bits": self.bits,
                "type": "float" if self.format == MXFP4 else "int",
                "symmetric": self.symmetric,
                "strategy": "channel" if self.group_size is None else "group",
                "group_size": self.group_size,
                "dynamic": False,
            },
        }


def _scheme(weight: Quantized) -> _Scheme:
    if isinstance(weight, Mxfp4Weight):
        return _Scheme(MXFP4, 4, weight.group_size, True)
    bits = 4 if isinstance(weight, Int4Weight) else 8
    return _Scheme(INTEGERS, bits, weight.group_size, weight.zeros is None)


def _quantization_config(weights: Mapping[str, Weight]) -> dict[str, Any] | None:
    """The quantization_config of config.json; None if no layer is quantized."""
    modules: dict[_Scheme, list[str]] = {}
    ignored = []
    for module, weight in _linears(weights):
        if isinstance(weight, Quantized):
            modules.setdefault(_scheme(weight), []).append(module)
        else:
            ignored.append(module)
    if not modules:
        return None
    formats = {scheme.format for scheme in modules}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{index}": scheme.of(["Linear"] if len(modules) == 1 else names)
            for index, (scheme, names) in enumerate(modules.items())
        },
        "ignore": ignored,
    }


def _linears(weights: Mapping[str, Weight]) -> Iterator[tuple[str, Weight | None]]:
    """Every linear layer by its module's name; None stands for a tied head."""
    for name, weight in weights.items():
        if is_block_matrix(name):
            yield their_name(name).removesuffix(".weight"), weight
    yield HEAD.removesuffix(".weight"), weights.get(HEAD)


def _write_weights(weights: Mapping[str, Weight], directory: Path, shard_bytes: int) -> None:
    """Writes one file, or several and their index."""
    shards = _shards(weights, shard_bytes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        tensors = {
            part: np.ascontiguousarray(array)
            for name in names
            for part, array in _tensors(their_name(name), weights[name]).items()
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(weight.nbytes for weight in weights.values())
        index_fields = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index_fields, indent=2))


def _shards(weights: Mapping[str, Weight], shard_bytes: int) -> list[list[str]]:
    """The names of the weights in each file."""
    shards: list[list[str]] = []
    room = 0
    for name, weight in weights.items():
        if not shards or weight.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= weight.nbytes
    return shards


def _tensors(name: str, weight: Weight) -> dict[str, np.ndarray]:
    """The tensors of a weight, by their names in the file."""
    if not isinstance(weight, Rounded):
        return {name: np.asarray(plain_values(weight))}
    weight = in_one_plane(by_rows(weight))
    parts = _codes(weight) if isinstance(weight, Mxfp4Weight) else _integers(weight)
    return {f"{name}_{part}": array for part, array in parts.items()}


def _codes(weight: Mxfp4Weight) -> dict[str, np.ndarray]:
    k = weight.in_features
    codes = np.asarray(unpack(weight.packed)[:, :k]).view(np.uint8) & 0xF
    return {
        "packed": pack_integers(codes, 4).view(np.uint8),
        "scale": np.asarray(weight.scales)[:, : groups(k, weight.group_size)],
    }


def _integers(weight: Int4Weight | Int8Weight) -> dict[str, np.ndarray]:
    bits, count = _scheme(weight).bits, groups(weight.in_features, weight.group_size)

    def packed(values: jax.Array) -> np.ndarray:
        return pack_integers(unsigned(np.asarray(values), bits), bits)

    parts = {
        "packed": packed(integers(weight)[:, : weight.in_features]),
        "scale": np.asarray(weight.scales)[:, :count],
        "shape": np.array(weight.shape, np.int64),
    }
    if weight.zeros is not None:
        parts["zero_point"] = packed(weight.zeros[:, :count].T).T
    return parts
