"""The architecture of a model, as one frozen value.

`ModelConfig` holds what the forward pass needs and nothing else. It is hashable, so it can be a
static field of a pytree: two models with equal configurations share one compiled program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from specjax.checks import Check, Number, Whole, check_flag, printable, shown

DTYPES = ("bfloat16", "float32")
SIZE = Whole(1, 2**31 - 1)
TOKEN = Whole(0, 2**31 - 1)
FACTOR = Number(1e6, above=0)
CHECKS: Mapping[str, Check] = {  # what the fields of a model and of its RoPE scaling accept
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), SIZE),
    **dict.fromkeys(("num_heads", "num_kv_heads", "max_position_embeddings"), SIZE),
    "num_layers": Whole(1, 10_000),
    "sliding_window": SIZE,
    "rms_norm_eps": Number(1, above=0),
    "rope_theta": Number(1e30, above=1),
    "factor": Number(1e6, least=1),
    "original_max_position_embeddings": TOKEN,
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "attention_factor"), FACTOR),
    **dict.fromkeys(("beta_fast", "beta_slow"), FACTOR),
    **dict.fromkeys(("tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias"), check_flag),
    **dict.fromkeys(("qk_norm", "hadamard", "truncate"), check_flag),
    "pad_id": TOKEN,
    "bos_id": TOKEN,
}


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
                f"RoPE scaling {shown(self.kind)} is not supported; supported: linear, llama3, yarn"
            )
        _check_fields(self)
        if self.kind != "linear" and self.original_max_position_embeddings < 1:
            raise ValueError(f"RoPE scaling {self.kind!r} needs original_max_position_embeddings")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below "
                f"high_freq_factor ({self.high_freq_factor})"
            )

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
        _check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(self.dtype)}")
        if not isinstance(self.model_type, str):
            raise ValueError(f"model_type must be a text, got {shown(self.model_type)}")
        if self.sliding_layers is not None:
            _check_integers("sliding_layers", self.sliding_layers, self.num_layers)
        _check_integers("stop_tokens", self.stop_tokens, 2**31)
        for token in (*self.stop_tokens, self.pad_id, self.bos_id or 0):
            if token >= self.vocab_size:
                raise ValueError(
                    f"token {token} is outside the vocabulary of {self.vocab_size} entries"
                )

    def window(self, layer: int | jax.Array) -> int | None:
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
        values = _known(cls, fields)
        if values.get("rope_scaling") is not None:
            scaling = _known(RopeScaling, values["rope_scaling"])
            values["rope_scaling"] = RopeScaling(**scaling)
        return cls(**values)


def _check_fields(values: ModelConfig | RopeScaling) -> None:
    """Raises ValueError unless every field has a value that it accepts, or is None by default."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if field.name in CHECKS and not (value is None and field.default is None):
            CHECKS[field.name](field.name, value)


def _check_integers(name: str, values: object, end: int) -> None:
    """Raises ValueError unless `values` is a tuple of integers below `end`."""
    if not isinstance(values, tuple):
        raise ValueError(f"{name} must hold integers, got {shown(values)}")
    for value in values:
        Whole(0, end - 1)(name, value)


def _known(kind: type[ModelConfig | RopeScaling], fields: Any) -> dict[str, Any]:
    """The fields of a value of this kind, as its constructor takes them. Raises ValueError on a
    field that this version lacks, on one that is missing, and on what is not a mapping."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"a model configuration must be an object, got {shown(fields)}")
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [printable(name) for name in fields if name not in known]
    if unknown:
        raise ValueError(
            f"unknown model configuration fields: {', '.join(sorted(unknown))}"
            " (written by a newer specjax?)"
        )
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in fields:
            raise ValueError(f"the model configuration lacks the field {name}")
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return {**fields, **lists}
