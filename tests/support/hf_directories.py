"""Small Hugging Face directories, made without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from checkpoints_tools.huggingface import their_name
from checkpoints_tools.huggingface_config import read_config
from specjax.model.weight_names import weight_shapes

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def write_config(path: Path, **changes: Any) -> Path:
    """Writes config.json with FIELDS and `changes`. A change to ... removes the field."""
    path.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in (FIELDS | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(fields))
    return path


def random_tensors(path: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors for the config.json in `path`, by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[json.loads((path / "config.json").read_text())["torch_dtype"]]
    return {
        their_name(name): rng.normal(scale=0.1, size=shape).astype(dtype)
        for name, shape in weight_shapes(read_config(path)).items()
    }


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], shards: int = 2) -> Path:
    """Writes `tensors` as several shards with an index, or as one file without an index."""
    names = list(tensors)
    size = math.ceil(len(names) / shards)
    parts = [names[start : start + size] for start in range(0, len(names), size)]
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, path / file)
    return path


def write_sparse(path: Path, **changes: Any) -> Path:
    """Writes a directory of zeros in sparse files, which take no space on disk."""
    write_config(path, **changes)
    header, end = {}, 0
    for name, shape in weight_shapes(read_config(path)).items():
        begin, end = end, end + 2 * math.prod(shape)
        offsets = [begin, end]
        header[their_name(name)] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    return path


def write_model(path: Path, *, shards: int = 2, seed: int = 0, **changes: Any) -> Path:
    """Writes a complete directory with random weights."""
    write_config(path, **changes)
    return write_tensors(path, random_tensors(path, seed), shards)
