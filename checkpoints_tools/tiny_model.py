"""The Llama that train_tiny.py trains, and its export as a Hugging Face directory.

This is a second, deliberately plain implementation of the architecture, with dense matrices and
without a cache. It shares no code with the library, so a mistake in the library's own model shows
as a difference and is not trained into the shipped weights.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save

from checkpoints_tools.tiny_corpus import END_OF_TEXT
from specjax.files.atomic_directory import check_replaceable, replacing

ArrayTree = dict[str, Any]  # nested by module; the leaves are arrays


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The fields of config.json that differ between presets."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 512


PRESETS = {
    "tiny": LlamaConfig(),
    "draft": LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1,
    ),
    "small": LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4,
    ),
}  # fmt: skip


def dense(features: int, name: str, scale: float = 1.0) -> nn.Dense:
    initial = nn.initializers.normal(0.02 * scale)
    return nn.Dense(features, use_bias=False, kernel_init=initial, name=name)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of x [B, T, H, E]: rotates components i and i + E/2 together."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies  # [T, E/2]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


class Attention(nn.Module):
    """Causal attention in which each KV head serves a group of query heads."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, (rows, length, _) = self.config, x.shape
        q = dense(c.num_attention_heads * c.head_dim, "q_proj")(x)
        k = dense(c.num_key_value_heads * c.head_dim, "k_proj")(x)
        v = dense(c.num_key_value_heads * c.head_dim, "v_proj")(x)
        q, k, v = (y.reshape(rows, length, -1, c.head_dim) for y in (q, k, v))  # [B, T, H, E]
        q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
        groups = c.num_attention_heads // c.num_key_value_heads
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / c.head_dim**0.5  # [B, H, T, T]
        past = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(past, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, -1)
        return dense(c.hidden_size, "o_proj", (2 * c.num_hidden_layers) ** -0.5)(mixed)


class FeedForward(nn.Module):
    """SwiGLU."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = nn.silu(dense(c.intermediate_size, "gate_proj")(x))
        up = dense(c.intermediate_size, "up_proj")(x)
        return dense(c.hidden_size, "down_proj", (2 * c.num_hidden_layers) ** -0.5)(gate * up)


class Layer(nn.Module):
    """A pre-normalized transformer layer, named as in Hugging Face's Llama."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        normed = nn.RMSNorm(c.rms_norm_eps, name="input_layernorm")(x)
        x = x + Attention(c, name="self_attn")(normed)
        normed = nn.RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x)
        return x + FeedForward(c, name="mlp")(normed)


class Llama(nn.Module):
    """Token ids [B, T] to logits [B, T, V]. The embedding matrix also serves as the head."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        initial = nn.initializers.normal(0.02)
        embed = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=initial, name="embed_tokens")
        x = embed(tokens)
        for index in range(c.num_hidden_layers):
            x = Layer(c, name=f"layers_{index}")(x)
        return embed.attend(nn.RMSNorm(c.rms_norm_eps, name="norm")(x))


def hf_tensors(params: ArrayTree) -> dict[str, np.ndarray]:
    """Parameters under Hugging Face's names, matrices as [out, in], in bfloat16."""
    tensors = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        value = np.asarray(leaf, np.float32)
        if name.endswith(".kernel"):
            value = value.T
        stem = name.rpartition(".")[0].replace("layers_", "layers.")
        tensors[f"model.{stem}.weight"] = np.ascontiguousarray(value.astype(bfloat16))
    return tensors


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def tokenizer_config(config: LlamaConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def _check_target(path: Path) -> None:
    check_replaceable(
        path, "a Hugging Face model", lambda found: (found / "model.safetensors").is_file()
    )


def export_hf(config: LlamaConfig, params: ArrayTree, tokenizer: Path, target: Path) -> None:
    """Writes the model as a Hugging Face directory, whole or not at all."""
    with replacing(target, _check_target) as fresh:
        weights = save(hf_tensors(params), metadata={"format": "pt"})
        (fresh / "model.safetensors").write_bytes(weights)
        shutil.copyfile(tokenizer, fresh / "tokenizer.json")
        documents = {
            "config.json": hf_config(config),
            "generation_config.json": {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False},
            "tokenizer_config.json": tokenizer_config(config),
        }
        for name, content in documents.items():
            (fresh / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
