"""Export to Hugging Face directories: reading gives the same bits, and other libraries read it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools import checkpoint, exporting
from checkpoints_tools.exporting import export
from checkpoints_tools.huggingface import their_name
from checkpoints_tools.huggingface_config import read_config, write_config
from checkpoints_tools.loading import load
from checkpoints_tools.quantization import quantize
from pallas_kernels.formats import (
    Int4Weight,
    Int8Weight,
    Quantized,
    int8_from_integers,
    mxfp4_from_codes,
)
from specjax.cli import main
from specjax.model.params import Params
from specjax.model.weight_names import HEAD, is_block_matrix, named_weights, params_from_weights
from tests.checkpoints.test_convert import assert_same
from tests.model.test_families import GOLDEN, NAMES
from tests.support.compiled import dequantize
from tests.support.random_models import CONFIG, random_model
from tests.support.random_weights import random_int4, with_outliers

SMALL = dataclasses.replace(CONFIG, num_layers=1, intermediate_size=192, head_dim=16)


def random_int8(n: int, k: int, group_size: int | None, zeros: bool) -> Int8Weight:
    rng = np.random.default_rng([n, k])
    groups = 1 if group_size is None else k // group_size
    return int8_from_integers(
        jnp.asarray(rng.integers(-128, 128, (n, k), dtype=np.int8)),
        jnp.asarray(rng.uniform(0.0005, 0.004, (n, groups)), jnp.float32),
        group_size,
        jnp.asarray(rng.integers(-128, 128, (n, groups), dtype=np.int8)) if zeros else None,
    )


def random_mxfp4(n: int, k: int) -> Quantized:
    rng = np.random.default_rng([n, k])
    return mxfp4_from_codes(
        jnp.asarray(rng.integers(0, 16, (n, k), dtype=np.uint8)),
        jnp.asarray(rng.integers(118, 124, (n, k // 32), dtype=np.uint8)),
    )


WEIGHTS = {
    "int4": lambda n, k: random_int4(n, k, 64),
    "int4 channel": lambda n, k: random_int4(n, k, None, "float16"),
    "int4 zeros": lambda n, k: random_int4(n, k, 32, "float32", zeros=True),
    "int8": lambda n, k: random_int8(n, k, None, zeros=False),
    "int8 zeros": lambda n, k: random_int8(n, k, 64, zeros=True),
    "mxfp4": random_mxfp4,
}


def model(kinds: dict[str, str] | str, head: bool = False, **changes: Any) -> Params:
    """A small model with weights of one kind, or of a kind for each linear layer's name."""
    config = dataclasses.replace(SMALL, **changes)
    params = random_model(config)
    if config.tie_word_embeddings:
        params = dataclasses.replace(params, lm_head=None)
    weights = named_weights(params)
    for name, weight in weights.items():
        if is_block_matrix(name) or (head and name == HEAD):
            kind = kinds if isinstance(kinds, str) else kinds.get(name.split(".")[-2])
            if kind is not None:
                weights[name] = WEIGHTS[kind](*weight.shape)
    return params_from_weights(config, weights)


# An exported model is read unchanged: weights, scales' dtypes, zeros, configuration.
@pytest.mark.parametrize("kind", WEIGHTS)
def test_round_trip(tmp_path: Path, kind: str) -> None:
    params = model(kind, head=kind == "int4 zeros")
    export(params, tmp_path / "out")
    assert_same(load(tmp_path / "out"), params)


# Layers of different schemes, some of them plain, get a group each.
def test_mixed_schemes(tmp_path: Path) -> None:
    params = model({"q": "int4", "k": "int4", "v": "int8 zeros", "up": "mxfp4"}, dtype="bfloat16")
    export(params, tmp_path / "out")
    assert_same(load(tmp_path / "out"), params)


@pytest.mark.parametrize("kind", [{}, "int4"])
def test_tied_and_plain(tmp_path: Path, kind: dict[str, str] | str) -> None:
    params = model(kind, tie_word_embeddings=True, stop_tokens=(2, 3), pad_id=3, bos_id=1)
    export(params, tmp_path / "out")
    assert_same(load(tmp_path / "out"), params)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in fields) == bool(kind)
    if kind:
        assert fields["quantization_config"]["ignore"] == ["lm_head"]


# A large model is written as several files and their index.
def test_shards(tmp_path: Path) -> None:
    params = model("int4")
    export(params, tmp_path / "out", shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert_same(load(tmp_path / "out"), params)


# The command writes what the function does, and the tokenizer's files beside it.
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = model("int4")
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint.save(params, tmp_path / "model", tokenizer_dir=tmp_path)
    command = ["export", str(tmp_path / "model"), str(tmp_path / "out")]
    assert main(command) == 0
    assert_same(load(tmp_path / "out"), params)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert main(command) == 1
    assert "exists; give a new path" in capsys.readouterr().err


# The configuration of every family is read unchanged.
@pytest.mark.parametrize("name", NAMES)
def test_config_round_trip(tmp_path: Path, name: str) -> None:
    config = read_config(GOLDEN / name)
    (tmp_path / "config.json").write_text(json.dumps(write_config(config)))
    assert read_config(tmp_path) == config


def changed(params: Params, weight: Quantized) -> Params:
    weights = named_weights(params) | {"layers.0.q.weight": weight}
    return params_from_weights(params.config, weights)


# A weight that the format cannot represent is refused in one sentence, and nothing is written.
def test_refusals(tmp_path: Path) -> None:
    params, d = random_model(SMALL), SMALL.hidden_size
    order = jnp.arange(d, dtype=jnp.int32)[::-1]
    for refused, message in (
        (changed(params, with_outliers(d, d)),
         "cannot represent the weight layers.0.q.weight: it has outlier columns"),
        (changed(params, dataclasses.replace(random_int4(d, d, 32), order=order)),
         "it has its columns in another order than the inputs"),
        (changed(params, random_int4(d, d, 32, minima=True)),
         "it has minima, where the format has integer zeros"),
        (changed(params, random_int4(d, d, 128)),
         "it has 64 inputs, not a multiple of group_size 128"),
        (dataclasses.replace(params, config=dataclasses.replace(SMALL, sliding_window=5)),
         "a llama model with sliding_window 5 cannot be described by Hugging Face's config.json"),
        (quantize(params, "quarot", group_size=32), "a llama model with hadamard True cannot be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            export(refused, tmp_path / "out")
    (tmp_path / "something").touch()
    with pytest.raises(ValueError, match="exists; give a new path"):
        export(params, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


# A file that appears at the path while the directory is written stays, and so does an export.
def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch) -> None:
    params, write = random_model(SMALL), exporting._write_weights
    other = quantize(params, group_size=32)

    def meanwhile(*arguments: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(exporting, "_write_weights", write)
            export(other, tmp_path / "out")
        write(*arguments)

    monkeypatch.setattr(exporting, "_write_weights", meanwhile)
    with pytest.raises(ValueError, match="out exists; give a new path"):
        export(params, tmp_path / "out")
    assert_same(load(tmp_path / "out"), other)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# compressed-tensors itself reads the same values, rounded to the scales' dtype as it does.
@pytest.mark.parametrize("kind", WEIGHTS)
def test_compressed_tensors_reads_it(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer
    from safetensors.torch import load_file

    params = model(kind)
    export(params, tmp_path / "out")
    reader = CompressedTensorsDequantizer(tmp_path / "out", dtype=torch.float32)
    read = reader.process(load_file(tmp_path / "out" / "model.safetensors"))
    for name, weight in named_weights(params).items():
        expected = dequantize(weight)
        if isinstance(weight, Int4Weight | Int8Weight):
            expected = expected.astype(weight.scales.dtype)
        np.testing.assert_array_equal(read[their_name(name)], expected.astype(jnp.float32))
