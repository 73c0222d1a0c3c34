"""The architecture of a model, as one frozen value.

`ModelConfig` holds what the forward pass needs and nothing else. It is hashable, so it can be a
static
field of a pytree: two models with equal configurations share one compiled program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretches rotary frequencies for long contexts.

    `kind` is "linear" (positions divided by `factor`), "llama3" (Llama 3.1: low frequencies
    divided, high ones kept, smooth between) or "yarn" (Peng et al. 2023). The other fields keep the
    names that Hugging Face configurations use.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ValueError(
                f"RoPE scaling {self.kind!r} is not supported; supported: linear, llama3, yarn"
            )
        if not self.factor >= 1.0:
            raise ValueError(f"RoPE scaling factor must be at least 1, got {self.factor}")
        if self.kind != "linear" and self.original_max_position_embeddings < 1:
            raise ValueError(f"RoPE scaling {self.kind!r} needs original_max_position_embeddings")

    @property
    def attention_scale(self) -> float:
        """Factor on cosines and sines. Only yarn has one: 0.1 · ln(factor) + 1 unless given."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family (RMSNorm, RoPE, SwiGLU, grouped queries).

    num_heads: need not equal `hidden_size / head_dim`.
    sliding_window: visible positions, the token's own included; applies to the layers in
        `sliding_layers`, or to every layer if that is None.
    hadamard: rotate the inputs of `o` across heads and those of `down` as a whole before the
    product,
        and queries and keys if the cache is quantized (QuaRot;
        `checkpoints_tools.quantization.quarot` makes the weights that expect it).
    stop_tokens, pad_id, bos_id: the facts about the tokenizer that decoding needs.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_type: str = "llama"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    hadamard: bool = False
    stop_tokens: tuple[int, ...] = ()
    pad_id: int = 0
    bos_id: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be positive or None, got {self.sliding_window}")
        for token in (*self.stop_tokens, self.pad_id):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"token {token} is outside the vocabulary of {self.vocab_size} entries"
                )

    def window(self, layer: int) -> int | None:
        """Returns the visible positions in `layer`, or None if it sees the whole context."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready description that `from_dict` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Inverts `to_dict`. Raises ValueError on a field that this version lacks."""
        unknown = set(fields) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(
                f"unknown model configuration fields: {', '.join(sorted(unknown))}"
                " (written by a newer specjax?)"
            )
        values = dict(fields)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        for name in ("stop_tokens", "sliding_layers"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)
