"""Every style of config.json reaches `ModelConfig`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints_tools.huggingface_config import read_config
from specjax.model.config import ModelConfig, RopeScaling
from specjax.model.rope import rope_frequencies
from tests.support import hf_directories

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def read(path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """The configuration of hf_directories.FIELDS with `changes`."""
    hf_directories.write_config(path, **changes)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return read_config(path)


# to_dict and from_dict are inverse, through JSON.
@pytest.mark.parametrize("scaling", [None, RopeScaling("yarn", 4.0, 128, attention_factor=1.5)])
def test_dict_round_trip(scaling: RopeScaling | None) -> None:
    config = ModelConfig(
        vocab_size=96, hidden_size=64, intermediate_size=172, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=16, rope_scaling=scaling, sliding_window=8,
        sliding_layers=(0, 2), stop_tokens=(2, 3),
    )  # fmt: skip
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown model configuration fields: novelty"):
        ModelConfig.from_dict({"novelty": 1})


# Llama's plain fields, by name; head_dim follows from the width where it is not given.
def test_llama(tmp_path: Path) -> None:
    assert read(tmp_path, rope_theta=5e5, attention_bias=True, mlp_bias=True) == ModelConfig(
        vocab_size=96, hidden_size=64, intermediate_size=172, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=5e5,
        max_position_embeddings=512, qkv_bias=True, output_bias=True, mlp_bias=True,
        stop_tokens=(2,), pad_id=2, bos_id=1, dtype="bfloat16",
    )  # fmt: skip


# Llama 2's first checkpoints say neither how many key-value heads nor which base there are.
def test_absent_fields_have_the_meaning_of_old(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=..., rms_norm_eps=..., tie_word_embeddings=...)
    assert (config.num_kv_heads, config.rope_theta, config.head_dim) == (4, 10000.0, 16)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-6, False)


# The old style of rotary and dtype fields and that of transformers 5 say the same.
@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_old_and_new_style_agree(tmp_path: Path, scaling: dict[str, Any]) -> None:
    typed = {"type": scaling["rope_type"]} | {k: v for k, v in scaling.items() if k != "rope_type"}
    old = read(tmp_path, rope_theta=5e5, rope_scaling=typed)
    parameters = scaling | {"rope_theta": 5e5}
    new = read(tmp_path, rope_parameters=parameters, torch_dtype=..., dtype="bfloat16")
    assert old == new
    assert old.rope_scaling is not None and old.rope_scaling.kind == scaling["rope_type"]


# Frequencies and the factor on cos and sin are those that transformers computes.
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        YARN,
        YARN | {"attention_factor": 0.7, "beta_fast": 20, "beta_slow": 2},
        YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
        YARN | {"factor": None},
    ],
)
def test_rope_agrees_with_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = read(tmp_path, rope_parameters=scaling | {"rope_theta": 5e5})
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    np.testing.assert_allclose(rope_frequencies(config), theirs.inv_freq.numpy(), rtol=2e-6)
    factor = config.rope_scaling.attention_scale if config.rope_scaling else 1.0
    assert factor == pytest.approx(theirs.attention_scaling)


# A context that is given outside the rotary fields goes before the one inside, as in transformers.
def test_original_context(tmp_path: Path) -> None:
    without = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert read(tmp_path, rope_scaling=without).rope_scaling == RopeScaling("yarn", 4.0, 512)
    outside = read(tmp_path, rope_scaling=YARN, original_max_position_embeddings=64)
    assert outside.rope_scaling == RopeScaling("yarn", 4.0, 64)


def test_mistral_has_its_window_in_every_layer(tmp_path: Path) -> None:
    config = read(tmp_path, **MISTRAL, sliding_window=32)
    assert (config.sliding_window, config.sliding_layers) == (32, None)
    assert read(tmp_path, **MISTRAL, sliding_window=None).sliding_window is None
    assert read(tmp_path, **MISTRAL).sliding_window == 4096


# Qwen2's window counts only if use_sliding_window says so, from max_window_layers upwards.
@pytest.mark.parametrize("family", [QWEN2, QWEN3])
def test_qwen_window(tmp_path: Path, family: dict[str, Any]) -> None:
    window = {"sliding_window": 32, "max_window_layers": 1}
    unused = read(tmp_path, **family, **window, use_sliding_window=False)
    assert (unused.sliding_window, unused.sliding_layers) == (None, None)
    used = read(tmp_path, **family, **window, use_sliding_window=True)
    assert (used.sliding_window, used.sliding_layers) == (32, (1,))
    types = ["sliding_attention", "full_attention"]
    listed = read(tmp_path, **family, **window, use_sliding_window=True, layer_types=types)
    assert (listed.sliding_window, listed.sliding_layers) == (32, (0,))
    window["max_window_layers"] = 0
    assert read(tmp_path, **family, **window, use_sliding_window=True).sliding_layers is None


def test_qwen2_has_biases_without_saying_so(tmp_path: Path) -> None:
    config = read(tmp_path, **QWEN2)
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (True, False, False)


def test_qwen3_has_head_norms(tmp_path: Path) -> None:
    config = read(tmp_path, **QWEN3)
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (False, False, True)
    assert config.head_dim == 128
    assert read(tmp_path, **QWEN3, head_dim=24, attention_bias=True).output_bias


def test_family_by_model_type(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=..., model_type="qwen3").qk_norm


# The tokens that end a text: one or several, and generation_config.json has the last word.
def test_stop_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=[4, 5]).stop_tokens == (4, 5)
    assert read(tmp_path, eos_token_id=None).stop_tokens == ()
    assert read(tmp_path, {"eos_token_id": [6, 7]}).stop_tokens == (6, 7)
    assert read(tmp_path, {"eos_token_id": None}).stop_tokens == (2,)


# Padding: as given, else the first stop token, else 0; some checkpoints pad with no token at all.
def test_pad_id(tmp_path: Path) -> None:
    assert read(tmp_path, pad_token_id=7).pad_id == 7
    assert read(tmp_path, pad_token_id=-1).pad_id == 2
    assert read(tmp_path, pad_token_id=96, eos_token_id=[4, 5]).pad_id == 4
    assert read(tmp_path, eos_token_id=...).pad_id == 0


# float16 becomes bfloat16, which has its size; a checkpoint that does not say is float32.
def test_dtype(tmp_path: Path) -> None:
    assert read(tmp_path, torch_dtype="float16").dtype == "bfloat16"
    assert read(tmp_path, torch_dtype="float32").dtype == "float32"
    assert read(tmp_path, torch_dtype=...).dtype == "float32"
    assert read(tmp_path, torch_dtype="float32", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture 'GemmaForCausalLM' is not supported; supported: LlamaForCausalLM, "
            "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        (
            {"architectures": ..., "model_type": "gpt2"},
            "architectures is missing and model_type is 'gpt2'; supported: LlamaForCausalLM, "
            "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        (
            {"torch_dtype": "float8"},
            "dtype 'float8' is not supported; supported: bfloat16, float16, float32",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_type 'linear' needs a number in factor, got None",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters per layer type are not supported; accepted: one for all",
        ),
        ({"hidden_size": ...}, "the field 'hidden_size' is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer from 1 to 2147483647, got '64'"),
        ({"num_key_value_heads": 3}, "num_heads (4) must be a multiple of num_kv_heads (3)"),
        ({"eos_token_id": 96}, "token 96 is outside the vocabulary of 96 entries"),
        (
            QWEN2 | {"layer_types": ["full_attention"]},
            "layer_types must have 2 entries, got 1",
        ),
        (
            QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types name sliding_attention, but sliding_window is not in use",
        ),
        (
            QWEN2 | {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types 'chunked_attention' are not supported; supported: full_attention, "
            "sliding_attention",
        ),
        (
            MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types of the mistral family must all be 'sliding_attention'",
        ),
    ],
)
def test_refusals_are_one_sentence(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        read(tmp_path, **changes)
    assert str(refusal.value) == f"{tmp_path / 'config.json'}: {message}"


# A wrong number would compute nonsense, or fail far from here.
NONSENSE: list[tuple[str, Any, str]] = [
    ("rope_theta", -1, "a number above 1 and at most 1e+30, got -1"),
    ("rope_theta", 0, "a number above 1 and at most 1e+30, got 0"),
    ("rope_theta", math.nan, "a number above 1 and at most 1e+30, got nan"),
    ("rope_theta", math.inf, "a number above 1 and at most 1e+30, got inf"),
    ("rope_theta", "1e4", "a number above 1 and at most 1e+30, got '1e4'"),
    ("rms_norm_eps", math.nan, "a number above 0 and at most 1, got nan"),
    ("rms_norm_eps", True, "a number above 0 and at most 1, got True"),
    ("eos_token_id", 1.5, "an integer from 0 to 2147483647, got 1.5"),
    ("eos_token_id", [2, "3"], "an integer from 0 to 2147483647, got '3'"),
    ("eos_token_id", True, "an integer from 0 to 2147483647, got True"),
    ("bos_token_id", 0.5, "an integer from -1 to 2147483647, got 0.5"),
    ("pad_token_id", [0], "an integer from -1 to 2147483647, got [0]"),
    ("tie_word_embeddings", "false", "true or false, got 'false'"),
    ("attention_bias", 1, "true or false, got 1"),
    ("use_sliding_window", "no", "true or false, got 'no'"),
    ("vocab_size", 2**31, "an integer from 1 to 2147483647, got 2147483648"),
    ("hidden_size", 64.0, "an integer from 1 to 2147483647, got 64.0"),
    ("num_hidden_layers", 10**6, "an integer from 1 to 10000, got 1000000"),
    ("max_window_layers", -1, "an integer from 0 to 2147483647, got -1"),
    ("architectures", "LlamaForCausalLM", "a list, got 'LlamaForCausalLM'"),
    ("layer_types", [["full_attention"]], "a text, got ['full_attention']"),
    ("torch_dtype", 16, "a text, got 16"),
    ("rope_scaling", "yarn", "an object, got 'yarn'"),
    ("quantization_config", [], "an object, got []"),
    ("factor", math.inf, "a number from 1 to 1e+06, got inf"),
    ("factor", 0.5, "a number from 1 to 1e+06, got 0.5"),
    ("factor", "8", "a number from 1 to 1e+06, got '8'"),
    ("attention_factor", math.nan, "a number above 0 and at most 1e+06, got nan"),
    ("beta_fast", 0, "a number above 0 and at most 1e+06, got 0"),
    ("truncate", "false", "true or false, got 'false'"),
    ("mscale", -1, "a number from 0 to 1e+06, got -1"),
    ("original_max_position_embeddings", 0.5, "an integer from 1 to 2147483647, got 0.5"),
]


@pytest.mark.parametrize(("field", "value", "accepted"), NONSENSE)
def test_nonsense_is_refused(tmp_path: Path, field: str, value: Any, accepted: str) -> None:
    scaling = field in YARN or field in ("attention_factor", "beta_fast", "truncate", "mscale")
    changes = {"rope_scaling": YARN | {field: value}} if scaling else {field: value}
    name = f"rope_scaling.{field}" if scaling else field
    with pytest.raises(ValueError) as refusal:
        read(tmp_path, **changes)
    start = f"{tmp_path / 'config.json'}: {name.split('.0')[0]}"
    assert str(refusal.value).startswith(start)
    assert str(refusal.value).endswith(f" must be {accepted}")


def test_equal_frequencies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"low_freq_factor \(1\.0\) must be below high_freq_factor"
    ):
        read(tmp_path, rope_scaling=LLAMA3 | {"high_freq_factor": 1.0})


def test_generation_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"generation_config\.json: eos_token_id must be an integer"
    ):
        read(tmp_path, {"eos_token_id": 1.5})


def test_null_means_absent(tmp_path: Path) -> None:
    nothing = dict.fromkeys(
        ("rms_norm_eps", "rope_theta", "rope_scaling", "head_dim", "hidden_act", "eos_token_id",
         "tie_word_embeddings", "attention_bias", "max_window_layers", "layer_types")
    )  # fmt: skip
    assert read(tmp_path, **nothing) == read(tmp_path, **dict.fromkeys(nothing, ...))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON: "),
        ("[1]", "must hold a JSON object, got list"),
        ("[" * 100_000, "is nested too deeply to be read"),
        ('{"a":' * 100_000, "is nested too deeply to be read"),
    ],
)
def test_config_that_is_no_object(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_invalid_values_are_refused(tmp_path: Path) -> None:
    config = read(tmp_path)
    for change, message in (
        ({"num_layers": 0}, "num_layers must be an integer from 1 to 10000, got 0"),
        ({"head_dim": 15}, "head_dim must be even for RoPE, got 15"),
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32, got 'float16'"),
        ({"sliding_window": 0}, "sliding_window must be an integer from 1 to 2147483647, got 0"),
    ):
        with pytest.raises(ValueError) as refusal:
            dataclasses.replace(config, **change)
        assert str(refusal.value) == message


# The library's own checkpoints hold the fields of ModelConfig as they are.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"stop_tokens": [1.5]}, "stop_tokens must be an integer from 0"),
        ({"stop_tokens": "ab"}, "stop_tokens must hold integers, got 'ab'"),
        ({"sliding_layers": [2]}, "sliding_layers must be an integer from 0 to 1, got 2"),
        ({"bos_id": 96}, "token 96 is outside the vocabulary of 96 entries"),
        ({"rope_scaling": "yarn"}, "must be an object, got 'yarn'"),
        ({"rope_scaling": {"kind": "linear"}}, "lacks the field factor"),
        ({"rope_scaling": {"kind": "linear", "factor": math.nan}}, "factor must be a number from"),
        ({"model_type": None}, "model_type must be a text, got None"),
        ({"dtype": ["\x1b[31m"]}, r"must be one of bfloat16, float32, got \('\\x1b\[31m',\)"),
        ({"a\x1b[31m": 1}, r"unknown model configuration fields: a\\x1b\[31m"),
    ],
)
def test_damaged_descriptions_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(read(tmp_path).to_dict() | change)
    for fields in ({}, [], None):
        with pytest.raises(ValueError, match="model configuration"):
            ModelConfig.from_dict(fields)  # type: ignore[arg-type]
