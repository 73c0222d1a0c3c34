"""The golden cases: one small Hugging Face configuration for each thing that families differ in.

Sizes are awkward on purpose: no power of two where one is not needed. Three prompts per case, of
lengths 3, n and n + 4, so that a test needs few distinct shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

NEW_TOKENS = 24
SHORT = (3, 29, 33)
ACROSS_BLOCKS = (3, 124, 128)  # generation crosses slot 128, where the cache's first block ends
BEYOND_A_BLOCK = (3, 146, 150)  # further than a sliding window behind slot 128

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # heads of 24: pair 0 is kept, pair 1 lies between, the others are divided
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}  # heads of 24: pairs 0 and 1 are kept, 2 to 5 lie between, the others are divided
YARN_OPTIONS = {
    "original_max_position_embeddings": 64,
    "attention_factor": 1.25,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "truncate": False,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration and how to try it.

    config: Hugging Face's configuration.
    lengths: tokens of each prompt.
    stop_count: how many stop tokens config.json shall name.
    older: fields that an older checkpoint's config.json has besides; None: no such file is kept.
    """

    config: PreTrainedConfig
    lengths: tuple[int, int, int] = SHORT
    stop_count: int = 1
    older: dict[str, Any] | None = None


def rope(theta: float) -> dict[str, Any]:
    """Plain rotary embedding."""
    return {"rope_type": "default", "rope_theta": theta}


def llama(**fields: Any) -> LlamaConfig:
    return LlamaConfig(**(_sizes() | fields))


def mistral(**fields: Any) -> MistralConfig:
    return MistralConfig(**(_sizes() | fields))


def qwen2(**fields: Any) -> Qwen2Config:
    return Qwen2Config(**(_sizes() | {"rope_parameters": rope(1e6)} | fields))


def qwen3(**fields: Any) -> Qwen3Config:
    return Qwen3Config(**(_sizes() | {"rope_parameters": rope(1e6)} | fields))


def _sizes() -> dict[str, Any]:
    """The fields that the cases share unless they say otherwise."""
    return {
        "vocab_size": 130,
        "hidden_size": 48,
        "intermediate_size": 76,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope(10000.0),
        "bos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


CASES: dict[str, Case] = {
    "llama2": Case(llama(num_key_value_heads=4)),
    "llama3": Case(llama(rope_parameters=rope(500000.0)), ACROSS_BLOCKS, stop_count=2),
    "llama31": Case(
        llama(num_attention_heads=2, num_key_value_heads=1, rope_parameters=LLAMA3_SCALING),
        older={},
    ),
    "llama32": Case(
        llama(
            num_attention_heads=2,
            num_key_value_heads=1,
            rope_parameters=LLAMA3_SCALING | {"factor": 32.0},
            tie_word_embeddings=True,
        )
    ),
    "codellama": Case(
        llama(
            num_key_value_heads=4,
            rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        ),
        older={"pretraining_tp": 1},
    ),
    "llama_bias": Case(llama(attention_bias=True, mlp_bias=True)),
    "llama_yarn": Case(
        llama(
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            rope_parameters=YARN_SCALING,
        )
    ),
    "llama_yarn_options": Case(llama(rope_parameters=YARN_SCALING | YARN_OPTIONS)),
    "llama_head_dim": Case(llama(head_dim=20)),
    "odd_sizes": Case(
        llama(
            vocab_size=133,
            hidden_size=72,
            intermediate_size=100,
            num_attention_heads=6,
            num_key_value_heads=3,
        )
    ),
    "mistral": Case(mistral(sliding_window=11), BEYOND_A_BLOCK),
    "qwen2": Case(
        qwen2(tie_word_embeddings=True),
        older={"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen25_window": Case(
        qwen2(num_hidden_layers=3, use_sliding_window=True, sliding_window=11, max_window_layers=1),
        older={},
    ),
    "qwen3": Case(qwen3(head_dim=20)),
}
