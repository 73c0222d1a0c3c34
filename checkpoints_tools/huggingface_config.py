"""Hugging Face's config.json as a `ModelConfig`.

The four families differ in few fields, and each field has been written in more than one style: the
old one (`rope_theta` and `rope_scaling`, `torch_dtype`) and that of transformers 5
(`rope_parameters`, `dtype`, `layer_types`). Absent fields mean what they mean to transformers.
A model that the library cannot compute is refused here, before any weight is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoints_tools.config_schema import CONFIG, GENERATION, check_fields, read_fields
from checkpoints_tools.prequantized import LayoutOf, read_layouts
from specjax.checks import shown
from specjax.model.config import ModelConfig, RopeScaling

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
QWEN3_HEAD_DIM = 128
QWEN_MAX_WINDOW_LAYERS = 28
ROPE_FIELDS = {  # the fields of each kind of scaling
    "linear": ("factor",),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
}
SAME_NAMES = (  # fields of the same name in config.json and ModelConfig
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "tie_word_embeddings",
)

Fields = Mapping[str, Any]


def read_config(path: Path) -> ModelConfig:
    """Reads config.json and, for the tokens that end a text, generation_config.json.

    A model in float16 gets dtype bfloat16, which has the same size and runs everywhere, but keeps 8
    of its 11 significant bits. Ask for float32 where that matters. A model without a dtype is
    float32.

    Args:
      path: the model's directory.

    Returns:
      The configuration.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: the file is not JSON, lacks a field, or asks for something unsupported.
    """
    fields = read_fields(path / "config.json", CONFIG)
    file = path / "generation_config.json"
    generation = read_fields(file, GENERATION) if file.is_file() else {}
    with _naming(path / "config.json"):
        return _config(fields, generation)


def config_from_fields(fields: Fields, source: Path) -> ModelConfig:
    """The configuration that the fields of a config.json describe, wherever they come from.

    Raises ValueError, which names `source`, if a field is missing or unsupported.
    """
    with _naming(source):
        check_fields(fields, CONFIG)
        return _config(fields, {})


def read_quantization(path: Path) -> LayoutOf | None:
    """How the quantized layers are stored, by config.json's quantization_config.

    Args:
      path: the model's directory.

    Returns:
      A function from the name of a layer to its layout; None for a model that is not quantized.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: the file is not JSON, lacks a field, or asks for something unsupported.
    """
    fields = read_fields(path / "config.json", CONFIG)
    # compression_config is what compressed-tensors wrote at first.
    quantization = fields.get("quantization_config") or fields.get("compression_config")
    if not quantization:
        return None
    with _naming(path / "config.json"):
        return read_layouts(quantization)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json that `read_config` reads as `config`, without a quantization_config.

    Both old and new versions of transformers read its style.

    Raises ValueError if config.json cannot describe such a model of its family.
    """
    family, scaling = config.model_type, config.rope_scaling
    fields = {
        "architectures": [name for name, each in FAMILIES.items() if each == family],
        "model_type": family,
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "torch_dtype": config.dtype,
        "eos_token_id": list(config.stop_tokens) or None,
        "pad_token_id": config.pad_id,
        "bos_token_id": config.bos_id,
        "rope_scaling": None if scaling is None else _rope_fields(scaling),
        **{name: getattr(config, name) for name in SAME_NAMES},
    }
    if family in ("llama", "qwen3"):
        fields["attention_bias"] = config.qkv_bias
    if family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    fields |= _sliding_fields(config)
    read_back = _config(fields, {})
    different = [
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(read_back, field.name)
    ]
    if different:
        raise ValueError(
            f"a {family} model with {different[0]} {getattr(config, different[0])!r} "
            "cannot be described by Hugging Face's config.json"
        )
    return fields


def _rope_fields(scaling: RopeScaling) -> dict[str, Any]:
    """The inverse of `_rope_scaling`."""
    values = {name: getattr(scaling, name) for name in ROPE_FIELDS[scaling.kind]}
    values = {name: value for name, value in values.items() if value is not None}
    return {"rope_type": scaling.kind, **values}


def _sliding_fields(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `_sliding`."""
    if config.model_type == "mistral":
        return {"sliding_window": config.sliding_window}
    if config.model_type == "llama" or config.sliding_window is None:
        return {}
    windows = [config.window(layer) for layer in range(config.num_layers)]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": kinds.count("full_attention"),
        "layer_types": kinds,
    }


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Puts the file's name before messages about its fields."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _config(fields: Fields, generation: Fields) -> ModelConfig:
    family = _family(fields)
    _refuse_unsupported(fields)
    heads = _needed(fields, "num_attention_heads")
    width = _needed(fields, "hidden_size")
    head_dim = QWEN3_HEAD_DIM if family == "qwen3" else width // heads
    theta, scaling = _rope(fields)
    window, sliding_layers = _sliding(fields, family)
    attention_bias = family in ("llama", "qwen3") and bool(fields.get("attention_bias"))
    return ModelConfig(
        vocab_size=_needed(fields, "vocab_size"),
        hidden_size=width,
        intermediate_size=_needed(fields, "intermediate_size"),
        num_layers=_needed(fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_needed(fields, "num_key_value_heads", heads),
        head_dim=_needed(fields, "head_dim", head_dim),
        model_type=family,
        rms_norm_eps=float(fields.get("rms_norm_eps") or 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_needed(fields, "max_position_embeddings"),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family == "llama" and bool(fields.get("mlp_bias")),
        qk_norm=family == "qwen3",
        sliding_window=window,
        sliding_layers=sliding_layers,
        dtype=_dtype(fields),
        **_tokens(fields, generation),
    )


def _needed(fields: Fields, name: str, default: int | None = None) -> int:
    """The value of a field; absent and null both mean `default`, if there is one."""
    value: int | None = default if fields.get(name) is None else fields[name]
    if value is None:
        raise ValueError(f"the field {name!r} is missing")
    return value


def _family(fields: Fields) -> str:
    """The family by `architectures`, or by `model_type` where that is absent."""
    supported = f"supported: {', '.join(FAMILIES)}"
    names = fields.get("architectures")
    if names:
        if names[0] not in FAMILIES:
            raise ValueError(f"architecture {shown(names[0])} is not supported; {supported}")
        return FAMILIES[names[0]]
    family = fields.get("model_type")
    if family not in FAMILIES.values():
        raise ValueError(f"architectures is missing and model_type is {shown(family)}; {supported}")
    return str(family)


def _refuse_unsupported(fields: Fields) -> None:
    if (fields.get("hidden_act") or "silu") != "silu":
        raise ValueError(
            f"hidden_act {shown(fields['hidden_act'])} is not supported; supported: silu"
        )


def _dtype(fields: Fields) -> str:
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype {shown(dtype)} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """The base of the rotary frequencies, and their scaling if there is any."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope_parameters per layer type are not supported; accepted: one for all")
    rotary = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if rotary not in (None, 1):
        raise ValueError(f"partial_rotary_factor must be 1, got {rotary}")
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"rope_type {shown(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    return theta, None if kind == "default" else _rope_scaling(kind, rope, fields)


def _rope_scaling(kind: str, rope: Fields, fields: Fields) -> RopeScaling:
    def required(name: str) -> float:
        if rope.get(name) is None:
            raise ValueError(f"rope_type {kind!r} needs a number in {name}, got None")
        return float(rope[name])

    if kind == "linear":
        return RopeScaling(kind, required("factor"))
    positions = _needed(fields, "max_position_embeddings")
    context = _needed(rope, "original_max_position_embeddings", positions)
    context = _needed(fields, "original_max_position_embeddings", context)
    if kind == "llama3":
        return RopeScaling(
            kind,
            required("factor"),
            context,
            low_freq_factor=required("low_freq_factor"),
            high_freq_factor=required("high_freq_factor"),
        )
    factor = positions / context if rope.get("factor") is None else required("factor")
    return RopeScaling(
        kind,
        factor,
        context,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.get("truncate") is not False,
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float | None:
    """The given factor, or DeepSeek's from two fields, or None for the paper's 0.1·ln(factor)+1."""
    given: float | None = rope.get("attention_factor")
    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if given is not None or not (scale and scale_all):
        return given
    logarithm = math.log(max(factor, 1.0))
    return float((0.1 * scale * logarithm + 1.0) / (0.1 * scale_all * logarithm + 1.0))


def _sliding(fields: Fields, family: str) -> tuple[int | None, tuple[int, ...] | None]:
    """`sliding_window` and `sliding_layers` of `ModelConfig`."""
    has_window = family == "mistral" or (
        family in ("qwen2", "qwen3") and bool(fields.get("use_sliding_window"))
    )
    window = fields.get("sliding_window", 4096) if has_window else None
    kinds = _layer_types(fields, family, window)
    layers = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    if layers and window is None:
        raise ValueError("layer_types name sliding_attention, but sliding_window is not in use")
    if not layers:
        return None, None
    return _needed(fields, "sliding_window", 4096), None if len(layers) == len(kinds) else layers


def _layer_types(fields: Fields, family: str, window: int | None) -> list[str]:
    count = _needed(fields, "num_hidden_layers")
    first = 0
    if family in ("qwen2", "qwen3"):
        first = _needed(fields, "max_window_layers", QWEN_MAX_WINDOW_LAYERS)
    implied = [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(count)
    ]
    kinds = fields.get("layer_types") or implied
    if len(kinds) != count:
        raise ValueError(f"layer_types must have {count} entries, got {len(kinds)}")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layer_types {', '.join(map(shown, sorted(unknown)[:4]))} are not supported; "
            "supported: full_attention, sliding_attention"
        )
    if family in ("llama", "mistral") and kinds != implied:
        raise ValueError(f"layer_types of the {family} family must all be {implied[0]!r}")
    return kinds


def _tokens(fields: Fields, generation: Fields) -> dict[str, Any]:
    """The tokens that end, pad and begin a text. generation_config.json takes precedence."""

    def ids(name: str) -> tuple[int, ...]:
        given = (generation.get(name), fields.get(name))
        value: Any = next((each for each in given if each is not None), [])
        return tuple(value) if isinstance(value, list) else (value,)

    def known(name: str) -> list[int]:
        """Some checkpoints pad with -1 or with a token outside the vocabulary."""
        return [token for token in ids(name) if 0 <= token < fields["vocab_size"]]

    stop = ids("eos_token_id")
    return {
        "stop_tokens": stop,
        "pad_id": (*known("pad_token_id"), *stop, 0)[0],
        "bos_id": (*known("bos_token_id"), None)[0],
    }
