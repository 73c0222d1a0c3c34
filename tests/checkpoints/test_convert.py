"""Conversion from Hugging Face directories: its results, and one sentence for each refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from checkpoints_tools import checkpoint, conversion, sources
from checkpoints_tools.conversion import convert
from checkpoints_tools.loading import load, load_tokenizer
from checkpoints_tools.quantization import quantize
from pallas_kernels.formats import Int4Weight
from pallas_kernels.interleave import by_rows
from specjax.cli import main
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params, stored
from tests.support.compiled import dequantize, forward, plain_values
from tests.support.hf_directories import random_tensors, write_config, write_model, write_tensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
EVERYTHING = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": True,
    "head_dim": 24,
}


def assert_same(left: Params, right: Params) -> None:
    left, right = stored(left), stored(right)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# Every tensor is loaded to its place, from shards or from one file.
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_load_huggingface(tmp_path: Path, shards: int) -> None:
    write_config(tmp_path, **EVERYTHING)
    tensors = random_tensors(tmp_path)
    params = load(write_tensors(tmp_path, tensors, shards))
    layer, prefix = params.layers[1], "model.layers.1."
    for weight, name in (
        (params.embedding, "model.embed_tokens.weight"),
        (params.final_norm, "model.norm.weight"),
        (params.lm_head.weight, "lm_head.weight"),
        (layer.attention_norm, prefix + "input_layernorm.weight"),
        (layer.mlp_norm, prefix + "post_attention_layernorm.weight"),
        (layer.q.weight, prefix + "self_attn.q_proj.weight"),
        (layer.o.bias, prefix + "self_attn.o_proj.bias"),
        (layer.k_norm, prefix + "self_attn.k_norm.weight"),
        (layer.down.weight, prefix + "mlp.down_proj.weight"),
    ):
        array = plain_values(weight)
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, tensors[name])
    assert layer.gate.bias is None


# Converted without quantization, a model equals the one that load reads from the source.
def test_convert_unquantized(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", **EVERYTHING)
    convert(source, tmp_path / "out", progress=False)
    assert_same(load(tmp_path / "out"), load(source))


# Converted with quantization, it equals the model quantized in memory.
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lm_head", [False, True])
def test_convert_quantized(tmp_path: Path, tied: bool, lm_head: bool) -> None:
    source = write_model(tmp_path / "source", tie_word_embeddings=tied)
    options = {"group_size": 32, "lm_head": lm_head}
    convert(source, tmp_path / "out", quantization="rtn", progress=False, **options)
    assert_same(load(tmp_path / "out"), quantize(load(source), "rtn", **options))


# float16 weights are quantized as they are, and rounded to bfloat16 only where they are kept.
def test_convert_float16(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", torch_dtype="float16")
    convert(source, tmp_path / "out", quantization="rtn", progress=False)
    halves, exact = load(tmp_path / "out"), quantize(load(source, dtype="float32"))
    assert halves.config.dtype == "bfloat16"
    assert plain_values(halves.embedding).dtype == jnp.bfloat16
    weights = [params.layers[0].q.weight for params in (halves, exact)]
    np.testing.assert_array_equal(weights[0].packed, weights[1].packed)
    np.testing.assert_array_equal(
        plain_values(halves.embedding), exact.embedding.astype(jnp.bfloat16)
    )


def test_convert_dtype(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    convert(source, tmp_path / "out", quantization="rtn", dtype="float32", progress=False)
    params = load(tmp_path / "out")
    assert params.config.dtype == "float32" and params.embedding.dtype == jnp.float32
    weight = by_rows(params.layers[0].q.weight)
    assert isinstance(weight, Int4Weight)
    original = dequantize(load(source).layers[0].q.weight)
    scale = np.asarray(weight.scales, np.float32)[:, :1]
    assert np.all(np.abs(dequantize(weight) - original) <= scale * (0.5 + 1e-5))


# A checkpoint of our own is copied as it is, quantized or not.
def test_convert_our_own(tmp_path: Path) -> None:
    convert(write_model(tmp_path / "source"), tmp_path / "one", quantization="rtn", progress=False)
    convert(tmp_path / "one", tmp_path / "two")
    assert_same(load(tmp_path / "two"), load(tmp_path / "one"))


# `quantize` is `convert` with a default method.
@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (["convert", "a", "b"], None),
        (["quantize", "a", "b"], "rtn"),
        (["convert", "a", "b", "--quantize", "int8"], "int8"),
        (["quantize", "a", "b", "--quantize", "int8"], "int8"),
    ],
)
def test_one_command(
    arguments: list[str], method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(conversion, "convert", lambda *_, **options: calls.append(options))
    assert main(arguments) == 0
    assert [call["quantization"] for call in calls] == [method]


def test_progress_shows_bytes_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(write_model(tmp_path / "source"), tmp_path / "out")
    shown = capsys.readouterr().err
    assert "21/21" in shown and "read 0.00 GB, memory " in shown


# Old versions saved the table of rotary frequencies, and some tied models a copy of the embedding.
def test_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    write_config(tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],
    }
    params = load(write_tensors(tmp_path, tensors | extra))
    assert params.lm_head is None


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / FIRST) | load_file(path / SECOND)


def change(path: Path, **changes: np.ndarray | None) -> None:
    """Sets tensors of a directory, or removes those that are None; the index follows."""
    tensors = tensors_of(path) | changes
    write_tensors(path, {name: value for name, value in tensors.items() if value is not None})


def spoil(path: Path, value: float) -> None:
    query = tensors_of(path)[QUERY]
    query[3, 5] = value
    change(path, **{QUERY: query})


def truncate(path: Path) -> None:
    os.truncate(path / SECOND, (path / SECOND).stat().st_size - 10)


def tie(path: Path) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))


def to_pickles(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), path / "model.safetensors.index.json"]:
        file.unlink()
    (path / "pytorch_model.bin").touch()


# A faulty source is refused in one sentence that names it, and nothing is written.
@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (shutil.rmtree, FileNotFoundError, "{} is not a model"),
        (
            lambda path: [file.unlink() for file in path.iterdir()],
            ValueError,
            "{} is not a checkpoint: it has neither config.json nor *.safetensors",
        ),
        (
            lambda path: (path / "config.json").unlink(),
            FileNotFoundError,
            "{} has no config.json",
        ),
        (
            to_pickles,
            FileNotFoundError,
            "{} has neither model.safetensors nor model.safetensors.index.json; safetensors is the "
            "only Hugging Face format that specjax reads",
        ),
        (truncate, ValueError, f"{{}}/{SECOND} is truncated or damaged: "),
        (
            lambda path: (path / SECOND).unlink(),
            FileNotFoundError,
            f"{{}}/model.safetensors.index.json names the shard {SECOND}, which does not exist",
        ),
        (
            lambda path: (path / "model.safetensors.index.json").write_text("{}"),
            ValueError,
            "{}/model.safetensors.index.json: weight_map must be an object, got None",
        ),
        (
            lambda path: change(path, **{QUERY: None}),
            ValueError,
            f"{{}} lacks the tensor {QUERY}",
        ),
        (
            lambda path: change(path, **{QUERY: np.ones((64, 63), np.float32)}),
            ValueError,
            f"the tensor {QUERY} in {{}}/{FIRST} has shape (64, 63), but config.json says "
            "(64, 64)",
        ),
        (
            lambda path: change(path, **{QUERY: np.ones((64, 64), np.int8)}),
            ValueError,
            f"the tensor {QUERY} in {{}}/{FIRST} has dtype I8; supported: BF16, F16, F32",
        ),
        (
            lambda path: change(path, **{"model.layers.0.self_attn.q_proj.bias": np.ones(64)}),
            ValueError,
            "{} has the tensor model.layers.0.self_attn.q_proj.bias, which a llama model with "
            "this config.json does not have",
        ),
        (
            lambda path: spoil(path, np.nan),
            ValueError,
            f"the tensor {QUERY} in {{}}/{FIRST} holds NaN or infinity",
        ),
        (
            lambda path: spoil(path, -np.inf),
            ValueError,
            f"the tensor {QUERY} in {{}}/{FIRST} holds NaN or infinity",
        ),
        (
            tie,
            ValueError,
            "config.json of {} says tie_word_embeddings, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false or remove the tensor",
        ),
    ],
    ids=[
        "no directory", "empty", "no config", "pickles", "truncated", "shard missing", "index",
        "tensor missing", "shape", "dtype", "unknown tensor", "nan", "infinity", "tied",
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(
    tmp_path: Path, damage: Callable[[Path], Any], kind: type[Exception], message: str
) -> None:
    source = write_model(tmp_path / "source")
    damage(source)
    with pytest.raises(kind) as refusal:
        convert(source, tmp_path / "out", quantization="rtn", progress=False)
    assert str(refusal.value).startswith(message.format(source))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_option_refusals(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    for options, message in (
        ({"quantization": "gguf"}, "method must be one of rtn, rtn-clip, gptq"),
        ({"quantization": "rtn", "group_size": 100}, "group_size must be 32, 64, 128 or None"),
        ({"lm_head": True}, "group_size, bits, lm_head and calibration need a quantization, got"),
        ({"group_size": 32}, "group_size, bits, lm_head and calibration need a quantization"),
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32, got 'float16'"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "out", progress=False, **options)
    with pytest.raises(ValueError, match="exists and is not a specjax checkpoint"):
        convert(source, source, progress=False)


def test_load_refusals(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a model: give a directory"):
        load("nowhere")
    source = write_model(tmp_path / "source")
    convert(source, tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="was converted with bfloat16, got 'float32'"):
        load(tmp_path / "out", dtype="float32")


# The models that ship with the library are found by name, wherever the process runs.
def test_shipped_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SHIPPED_PATH", tmp_path)
    params = load(write_model(tmp_path / "hf"))
    checkpoint.save(params, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path / "hf")
    assert_same(load("tiny"), params)
    assert_same(load("."), params)


def write_tokenizer(path: Path) -> None:
    """A tokenizer of bytes that begins every text with <s>, saved with the settings of training."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0} | {letter: i for i, letter in enumerate(alphabet, 1)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path / "tokenizer.json"))


# The tokenizer is copied, adds its own special tokens, and neither truncates nor pads.
def test_tokenizer(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    write_tokenizer(source)
    convert(source, tmp_path / "out", progress=False)
    for path in (source, tmp_path / "out"):
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode("héllo wörld")
        assert ids[0] == 0 and len(ids) == 14
        assert tokenizer.decode(ids) == "héllo wörld"
        assert tokenizer.vocab_size == 257


def test_tokenizer_refusals(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"has neither tokenizer\.json nor tokenizer\.model"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: "):
        load_tokenizer(tmp_path)


# An older checkpoint has a SentencePiece model only; Llama's begins a text with its first token.
def test_sentencepiece_tokenizer(tmp_path: Path, data: Path) -> None:
    model = data / "tokenizers" / "storyllamas4096" / "tokenizer_4096.model"
    shutil.copyfile(model, tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("Once upon a time")
    assert len(ids) > 1 and tokenizer.decode(ids) == "Once upon a time"
    assert tokenizer.decode(ids[:1]) == ""


# A real model's logits equal those of Hugging Face's torch implementation.
def test_real_model_logits(data: Path) -> None:
    path = data / "models" / "stories260K" / "hf"
    params = load(path)
    with np.load(path / "golden_hf.npz") as golden:
        prompts = [golden[f"ids{row}"] for row in range(3)]
        expected = [golden[f"logits{row}"] for row in range(3)]
    width = max(map(len, prompts))
    tokens = np.stack([np.pad(prompt, (0, width - len(prompt))) for prompt in prompts])
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    cache = KVCache.create(params.config, len(prompts), width)
    logits, _ = jax.jit(forward)(params, tokens.astype(np.int32), positions, cache)
    for row, theirs in zip(logits, expected, strict=True):
        np.testing.assert_allclose(row[: len(theirs)], theirs, rtol=0, atol=1e-4)
