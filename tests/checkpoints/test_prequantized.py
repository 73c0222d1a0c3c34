"""Checkpoints that are quantized already: every weight is what its format's own rule gives.

The tensors are packed by `tests.packers` from the definitions of the layouts, not by the library.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.conversion import convert
from checkpoints_tools.loading import load
from checkpoints_tools.prequantized.patterns import compile_patterns
from pallas_kernels.formats import Int4Weight, Int8Weight, Mxfp4Weight
from pallas_kernels.weights import Weight
from specjax.model.params import Params
from tests.checkpoints.test_convert import assert_same
from tests.support import packers
from tests.support.compiled import dequantize, plain_values
from tests.support.covering import representatives
from tests.support.hf_directories import random_tensors
from tests.support.packers import (
    AWQ,
    EVEN,
    GPTQ,
    ODD,
    PACKED,
    Packer,
    all_but_head,
    with_tensors,
    write_quantized,
)


def weight_of(params: Params, module: str) -> Weight:
    if module == "lm_head":
        return params.lm_head.weight
    *_, index, _, name = module.split(".")
    return getattr(params.layers[int(index)], name.removesuffix("_proj")).weight


CASES: dict[str, tuple[dict[str, Any], Packer, type, dict[str, Any]]] = {
    "awq": (AWQ, packers.awq(64), Int4Weight, EVEN),
    "awq channel": (AWQ | {"group_size": -1}, packers.awq(-1), Int4Weight, EVEN),
    "awq without zeros": (
        AWQ | {"zero_point": False}, packers.awq(64, zero_point=False), Int4Weight, EVEN,
    ),
    # Zeros of 0 are stored as 15, those of 15 as 14.
    "gptq v1": (GPTQ, packers.gptq(4, 128, symmetric=False, stored_version=1), Int4Weight, ODD),
    "gptq v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        packers.gptq(4, 128, symmetric=False, stored_version=2), Int4Weight, ODD,
    ),
    "gptq symmetric": (
        GPTQ | {"sym": True, "group_size": 32},
        packers.gptq(4, 32, symmetric=True, stored_version=1), Int4Weight, ODD,
    ),
    "gptq symmetric, v2 called v1": (
        GPTQ | {"sym": True, "group_size": 32, "checkpoint_format": "gptq"},
        packers.gptq(4, 32, symmetric=True, stored_version=2), Int4Weight, ODD,
    ),
    "gptq act-order": (
        GPTQ | {"group_size": 32, "desc_act": True},
        packers.gptq(4, 32, symmetric=False, stored_version=1, act_order=True), Int4Weight, ODD,
    ),
    "gptq channel": (
        GPTQ | {"group_size": -1},
        packers.gptq(4, -1, symmetric=False, stored_version=1, act_order=True), Int4Weight, ODD,
    ),
    "gptq without g_idx": (
        GPTQ | {"group_size": 64},
        packers.gptq(4, 64, symmetric=False, stored_version=1, g_idx=False), Int4Weight, ODD,
    ),
    "gptq 8 bits act-order": (
        GPTQ | {"bits": 8, "group_size": 64},
        packers.gptq(8, 64, symmetric=False, stored_version=1, act_order=True), Int8Weight, ODD,
    ),
    "gptq 8 bits symmetric": (
        GPTQ | {"bits": 8, "sym": True},
        packers.gptq(8, 128, symmetric=True, stored_version=1), Int8Weight, ODD,
    ),
    "packed": (
        PACKED, packers.compressed_tensors(4, 32, symmetric=True), Int4Weight, ODD,
    ),
    "packed asymmetric": (
        packers.compressed_tensors_config(4, 128, False),
        packers.compressed_tensors(4, 128, symmetric=False), Int4Weight, ODD,
    ),
    "packed channel": (
        packers.compressed_tensors_config(4, -1, False),
        packers.compressed_tensors(4, -1, symmetric=False), Int4Weight, ODD,
    ),
    "packed act-order": (
        packers.compressed_tensors_config(4, 32, False, actorder="group"),
        packers.compressed_tensors(4, 32, symmetric=False, g_idx=True), Int4Weight, ODD,
    ),
    "packed 8 bits": (
        packers.compressed_tensors_config(8, -1, True),
        packers.compressed_tensors(8, -1, symmetric=True), Int8Weight, ODD,
    ),
    "packed 8 bits asymmetric": (
        packers.compressed_tensors_config(8, 64, False),
        packers.compressed_tensors(8, 64, symmetric=False), Int8Weight, ODD,
    ),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        packers.mxfp4("weight_blocks", "weight_scales"), Mxfp4Weight, ODD,
    ),
    "mxfp4 packed": (
        packers.compressed_tensors_config(4, 32, True, type="float")
        | {"format": "mxfp4-pack-quantized"},
        packers.mxfp4("weight_packed", "weight_scale"), Mxfp4Weight, ODD,
    ),
}  # fmt: skip


WITHOUT_ZEROS = (
    "awq without zeros", "gptq symmetric", "gptq symmetric, v2 called v1", "gptq 8 bits symmetric",
    "packed", "packed 8 bits",
)  # fmt: skip


# Every weight equals what its format's own rule gives; unquantized weights are plain.
@pytest.mark.parametrize("case", CASES)
def test_weights_are_exact(tmp_path: Path, case: str) -> None:
    config, packer, kind, fields = CASES[case]
    expected = write_quantized(tmp_path, config, all_but_head(packer), fields, shards=2)
    params = load(tmp_path)
    for module, values in expected.items():
        weight = weight_of(params, module)
        assert type(weight) is kind
        np.testing.assert_array_equal(dequantize(weight), values, err_msg=module)
        if kind is not Mxfp4Weight:
            assert weight.scales.dtype == jnp.float16
            assert (weight.zeros is None) == (case in WITHOUT_ZEROS)
    tensors = random_tensors(tmp_path)
    for array, name in (
        (params.embedding, "model.embed_tokens.weight"),
        (params.lm_head.weight, "lm_head.weight"),
    ):
        np.testing.assert_array_equal(plain_values(array), tensors[name])


# Inputs keep their order unless their groups are not consecutive.
def test_order_only_where_it_is_needed(tmp_path: Path) -> None:
    for case, ordered in (("gptq act-order", True), ("gptq channel", False), ("gptq v1", False)):
        config, packer, _, fields = CASES[case]
        write_quantized(tmp_path / case, config, all_but_head(packer), fields)
        assert (load(tmp_path / case).layers[0].down.weight.order is not None) == ordered


# A quantized head is read, and a tied embedding no longer serves as the head.
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_head(tmp_path: Path, tied: bool) -> None:
    packer = packers.gptq(4, 128, symmetric=False, stored_version=1)
    fields = ODD | {"tie_word_embeddings": tied}
    expected = write_quantized(tmp_path, GPTQ, lambda module: packer, fields)
    params = load(tmp_path)
    assert not params.config.tie_word_embeddings
    np.testing.assert_array_equal(dequantize(params.lm_head.weight), expected["lm_head"])


# Patterns assign schemes to layers; a layer without a scheme is plain.
def test_schemes_by_pattern(tmp_path: Path) -> None:
    def group(targets: str, bits: int, group_size: int) -> dict[str, Any]:
        config = packers.compressed_tensors_config(bits, group_size, True)
        return config["config_groups"]["group_0"] | {"targets": [targets]}

    def packer_of(module: str) -> Packer | None:
        if "v_proj" in module or module == "lm_head":
            return None
        bits, size = (8, 32) if "self_attn" in module else (4, -1)
        return packers.compressed_tensors(bits, size, symmetric=True)

    config = PACKED | {
        "ignore": ["re:.*v_proj", "lm_head"],
        "config_groups": {"a": group("Linear", 4, -1), "b": group("re:.*self_attn", 8, 32)},
    }
    expected = write_quantized(tmp_path, config, packer_of)
    params = load(tmp_path)
    for module, values in expected.items():
        np.testing.assert_array_equal(dequantize(weight_of(params, module)), values)
    name = "model.layers.0.self_attn.v_proj"
    values = random_tensors(tmp_path)[f"{name}.weight"]
    np.testing.assert_array_equal(plain_values(weight_of(params, name)), values)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*lm_head", r".*gate$", r"model.layers.[0-9]+.mlp", r".*layers\.\d+\.mlp\..*",
        r".*self_attn\.(q|k|v)_proj", r".*mlp\.(gate|up|gate_up|down)_proj.*", r"[^.]+$",
        r"^model\.layers\.(0|1[0-9])\.(?:self_attn|mlp(\.gate)?)", r"lm_.*|.*?up_proj", r"",
        r"(|l)?m", r".+_pro?jj?$",
    ],
)  # fmt: skip
def test_patterns_mean_what_they_mean_to_python(pattern: str) -> None:
    test = compile_patterns([f"re:{pattern}"])[f"re:{pattern}"]
    layers = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate")
    for name in ("lm_head", *(f"model.layers.{i}.{each}" for i in (0, 3, 12) for each in layers)):
        assert test(name) == bool(re.match(pattern, name))


# Python's matcher would go back through exponentially many ways to match these.
@pytest.mark.parametrize("pattern", [".?" * 60 + "!", "(a|.)" * 60 + "!", ".*" * 60 + "!"])
def test_no_pattern_takes_long(pattern: str) -> None:
    test = compile_patterns([f"re:{pattern}"])[f"re:{pattern}"]
    assert not test("a" * 100)


# A converted model equals the loaded one, with scales in the file's dtype.
@pytest.mark.parametrize("case", ["gptq act-order", "packed 8 bits asymmetric"])
def test_convert(tmp_path: Path, case: str) -> None:
    config, packer, _, fields = CASES[case]
    write_quantized(tmp_path / "source", config, all_but_head(packer), fields)
    convert(tmp_path / "source", tmp_path / "out", progress=False)
    assert_same(load(tmp_path / "out"), load(tmp_path / "source"))


# The package compressed-tensors reads the same values, rounded to the scales' dtype.
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("packed", "mxfp4 p"))])
def test_compressed_tensors_agrees(tmp_path: Path, case: str) -> None:
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer
    from safetensors.torch import load_file as load_torch_file

    config, packer, kind, _ = CASES[case]
    if config["config_groups"]["group_0"]["weights"].get("actorder"):
        pytest.skip("new versions of the package no longer read g_idx")
    fields = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256}
    expected = write_quantized(tmp_path, config, all_but_head(packer), fields)
    reader = CompressedTensorsDequantizer(tmp_path, dtype=torch.float32)
    read = reader.process(load_torch_file(tmp_path / "model.safetensors"))
    for module, values in expected.items():
        rounded = values if kind is Mxfp4Weight else values.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(read[f"{module}.weight"], rounded)


# Greedy output with quantized drafts is that of plain decoding, bit for bit.
@pytest.mark.parametrize(
    "case", representatives(["awq", "gptq act-order", "packed 8 bits asymmetric"], "gptq act-order")
)
def test_decode_is_exact(tmp_path: Path, case: str) -> None:
    config, packer, _, fields = CASES[case]
    write_quantized(tmp_path, config, all_but_head(packer), fields)
    params = load(tmp_path)
    prompt = [[5, 17, 3, 40], [9, 2, 77]]
    plain, drafted = (
        specjax.decode(params, prompt, max_new_tokens=24, drafter=drafter, stop_tokens=())
        for drafter in (specjax.Autoregressive(), specjax.QSpec(activation="a8"))
    )
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    assert drafted.stats.drafted.min() > 0


# AutoGPTQ's zero biases are ignored; any other value is a contradiction.
def test_biases_of_zeros(tmp_path: Path) -> None:
    packer = packers.gptq(4, 128, symmetric=False, stored_version=1, bias=True)
    write_quantized(tmp_path, GPTQ, all_but_head(packer))
    assert load(tmp_path).layers[0].q.bias is None
    with_tensors(tmp_path, {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float16)})
    with pytest.raises(ValueError, match=r"has the tensor .*q_proj\.bias"):
        load(tmp_path)


# A model's own biases are read beside the quantized weights.
def test_biases(tmp_path: Path) -> None:
    fields = ODD | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    expected = write_quantized(
        tmp_path, PACKED, all_but_head(packers.compressed_tensors(4, 32, symmetric=True)), fields
    )
    q = load(tmp_path).layers[0].q
    name = "model.layers.0.self_attn.q_proj"
    np.testing.assert_array_equal(q.bias, random_tensors(tmp_path)[f"{name}.bias"])
    np.testing.assert_array_equal(dequantize(q.weight), expected[name])
