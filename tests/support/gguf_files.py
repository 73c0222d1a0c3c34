"""Small GGUF files, written by the `gguf` package from random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from checkpoints_tools.gguf.model import their_name
from specjax.model.config import ModelConfig
from specjax.model.weight_names import weight_shapes

CONFIG = ModelConfig(
    vocab_size=288, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, max_position_embeddings=512, rms_norm_eps=1e-5,
    tie_word_embeddings=True, stop_tokens=(2,), pad_id=2, bos_id=1,
)  # fmt: skip
BYTES = {**{byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}}
BYTES |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in BYTES)}
MERGES = ["t h", "th e", "Ġ the", "a n", "Ġ an", "i n"]
TOKENS = ["<unk>", "<s>", "</s>", "<|turn|>", *(BYTES[b] for b in range(256)),
          *(merge.replace(" ", "") for merge in MERGES)]  # fmt: skip
TOKENS += [f"<unused {i}>" for i in range(CONFIG.vocab_size - len(TOKENS))]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def random_blocks(kind: gguf.GGMLQuantizationType, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bits with finite scales: uint8[N, bytes per row]."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n, k // block, size), dtype=np.uint8)
    halves = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q8_0": 1, "Q4_K": 2, "Q5_K": 2}
    count = halves.get(kind.name, 0)
    scales = rng.normal(scale=0.02, size=(n, k // block, count)).astype(np.float16)
    blocks[..., : 2 * count] = scales.view(np.uint8)
    if kind.name == "Q6_K":  # its scale comes last
        last = rng.normal(scale=1e-4, size=(n, k // block, 1)).astype(np.float16)
        blocks[..., -2:] = last.view(np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = rng.integers(100, 130, blocks.shape[:2])
    return blocks.reshape(n, -1)


def random_tensors(
    config: ModelConfig = CONFIG, kind: str = "Q4_1", seed: int = 0
) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """A model's tensors by GGUF name: matrices in `kind`, the embedding in Q8_0."""
    rng = np.random.default_rng(seed)
    kinds, found = gguf.GGMLQuantizationType, {}
    for name, shape in weight_shapes(config).items():
        values = rng.normal(scale=0.1, size=shape).astype(np.float32)
        each = kinds.F32 if len(shape) == 1 else kinds[kind]
        if name == "embedding" and each not in (kinds.F32, kinds.F16, kinds.BF16):
            each = kinds.Q8_0
        values = values if len(shape) == 2 else values + 1
        try:
            data = gguf.quants.quantize(values, each)
        except NotImplementedError:
            data = random_blocks(each, *shape, seed=len(found))
        found[their_name(name)] = (data, each)
    return found


def fields(architecture: str = "llama", config: ModelConfig = CONFIG) -> dict[str, Any]:
    """A model's metadata by GGUF name."""
    sizes = {
        "block_count": config.num_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": 10000.0,
        "rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size,
    }  # fmt: skip
    if config.head_dim * config.num_heads != config.hidden_size:
        sizes["attention.key_length"] = config.head_dim
    tokenizer = {
        "model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": MERGES,
        "token_type": [3] * 4 + [1] * (len(TOKENS) - 4),
        "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 2,
    }  # fmt: skip
    return {
        **{f"{architecture}.{name}": value for name, value in sizes.items()},
        **{f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()},
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    file: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
    architecture: str = "llama",
    split: int = 0,
) -> Path:
    """Writes a model as one file, or as parts of a few tensors. Returns the first file."""
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    for name, value in metadata.items():
        _add(writer, name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if file.exists() else sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0]


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }[type(value)]  # fmt: skip
    add(name, value)
