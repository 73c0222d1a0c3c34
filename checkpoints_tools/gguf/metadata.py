"""GGUF's metadata as a `ModelConfig`.

The fields get the names that they have in Hugging Face's config.json and are read as from there, so
both kinds of models are checked by one schema.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from checkpoints_tools.gguf.header import Header
from checkpoints_tools.huggingface_config import config_from_fields
from specjax.checks import shown
from specjax.model.config import ModelConfig
from specjax.model.rope import rope_frequencies

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's models too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SIZES = {  # GGUF's fields, which the name of the architecture precedes, by those of config.json
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
NUMBERS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
SCALING = "rope.scaling."  # begins the fields below
SCALING_NAMES = ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast",
                 "yarn_beta_slow", "finetuned")  # fmt: skip
SCALING_TYPES = ("none", "linear", "yarn")
LLAMA3_CONTEXT = 8192  # Llama 3's training context, before its frequencies were stretched


def model_config(
    header: Header, tensors: Collection[str], factors: np.ndarray | None
) -> ModelConfig:
    """The configuration that a file's metadata describes.

    Args:
      header: the file's, or that of the first part.
      tensors: the names of all tensors, which tell whether there are biases and a head.
      factors: divide the rotary frequencies, f32[E / 2]; or None.

    Returns:
      The configuration, in bfloat16: GGUF files name no dtype for activations.

    Raises:
      ValueError: a field is missing or invalid, or the model is not supported.
    """
    family = header.get("general.architecture", str)
    if family not in ARCHITECTURES:
        raise ValueError(
            f"{header.file}: architecture {shown(family)} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if (experts := header.get(f"{family}.expert_count", int, 0)) != 0:
        raise ValueError(f"{header.file}: {family}.expert_count {experts} is not supported")
    fields: dict[str, Any] = {
        **{ours: header.get(f"{family}.{theirs}", int) for ours, theirs in SIZES.items()},
        **{ours: header.get(f"{family}.{theirs}", float) for ours, theirs in NUMBERS.items()},
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": header.get(f"{family}.vocab_size", int, len(_vocabulary(header))),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": family == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "dtype": "bfloat16",
        "rope_scaling": _rope_scaling(header, family),
        **_tokens(header),
    }
    config = _with_factors(header, fields, factors)
    rotated = header.get(f"{family}.rope.dimension_count", int, config.head_dim)
    if rotated != config.head_dim:
        raise ValueError(
            f"{header.file}: {family}.rope.dimension_count must be {config.head_dim}, all of a "
            f"head, got {rotated}"
        )
    return config


def _vocabulary(header: Header) -> list[str]:
    tokens = header.get("tokenizer.ggml.tokens", list)
    if tokens is None:
        raise ValueError(f"{header.file} has no tokenizer.ggml.tokens")
    return tokens


def _rope_scaling(header: Header, family: str) -> dict[str, Any] | None:
    """The scaling in the fields of config.json, with the meaning that llama.cpp gives to GGUF's."""
    scaling = f"{family}.{SCALING}"
    for name in header.names():
        if name.startswith(scaling) and name.removeprefix(scaling) not in SCALING_NAMES:
            raise ValueError(f"{header.file}: {name} is not supported")
    kind = header.get(f"{scaling}type", str, "linear")
    if kind not in SCALING_TYPES:
        raise ValueError(
            f"{header.file}: {scaling}type {shown(kind)} is not supported; "
            f"supported: {', '.join(SCALING_TYPES)}"
        )
    older = header.get(f"{family}.rope.scale_linear", float, 0.0)
    factor = header.get(f"{scaling}factor", float, older) or 1.0
    magnitude = header.get(f"{scaling}attn_factor", float, 1.0)
    if kind == "yarn":
        return _yarn(header, scaling, factor, magnitude)
    if magnitude != 1.0:
        raise ValueError(
            f"{header.file}: {scaling}attn_factor {magnitude} is supported with the type yarn only"
        )
    return None if kind == "none" or factor == 1.0 else {"rope_type": kind, "factor": factor}


def _yarn(header: Header, scaling: str, factor: float, magnitude: float) -> dict[str, Any]:
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": header.get(f"{scaling}original_context_length", int),
        "beta_fast": header.get(f"{scaling}yarn_beta_fast", float),
        "beta_slow": header.get(f"{scaling}yarn_beta_slow", float),
        # GGUF's factor multiplies the paper's, in whose place config.json has the product.
        "attention_factor": magnitude * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    }
    return {name: each for name, each in found.items() if each is not None}


def _tokens(header: Header) -> dict[str, Any]:
    """The tokens that end, begin and pad a text. A text ends also where a turn or message ends."""
    names = ("eos", "eot", "eom", "bos", "padding")
    ids = {name: header.get(f"tokenizer.ggml.{name}_token_id", int) for name in names}
    stops = dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None)
    return {
        "eos_token_id": list(stops) or None,
        "bos_token_id": ids["bos"],
        "pad_token_id": ids["padding"],
    }


def _with_factors(
    header: Header, fields: dict[str, Any], factors: np.ndarray | None
) -> ModelConfig:
    """The configuration whose frequencies are those that the file's factors give.

    The largest factor is one of the four parameters of Llama 3.1's rule. The others have been the
    same in every release.
    """
    if factors is None:
        return config_from_fields(fields, header.file)
    if fields["rope_scaling"] is not None:
        raise ValueError(
            f"{header.file}: rope_freqs.weight together with another scaling is not supported"
        )
    stretched = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }
    plain = config_from_fields(fields, header.file)
    config = config_from_fields(fields | {"rope_scaling": stretched}, header.file)
    found = rope_frequencies(plain) / rope_frequencies(config)
    if found.shape != factors.shape or not np.allclose(found, factors, rtol=1e-4):
        raise ValueError(
            f"{header.file}: rope_freqs.weight is not Llama 3.1's rule, the only one supported"
        )
    return config
