"""Quantized checkpoints that contradict themselves or are not supported: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn
from safetensors.numpy import load_file

from checkpoints_tools.loading import load
from tests.support import packers
from tests.support.hf_directories import random_tensors, write_config, write_tensors
from tests.support.packers import (
    AWQ,
    GPTQ,
    ODD,
    PACKED,
    Packer,
    all_but_head,
    with_tensors,
    write_quantized,
)

DOWN = "model.layers.0.mlp.down_proj"
GPTQ_PACKER = packers.gptq(4, 128, symmetric=False, stored_version=1)
PACKED_PACKER = packers.compressed_tensors(4, 32, symmetric=True)


def set_config(path: Path, config: Mapping[str, Any] | None) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))


def spoil(name: str, value: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        array = load_file(path / "model.safetensors")[name]
        array.reshape(-1)[3] = value
        with_tensors(path, {name: array})

    return damage


# Contradictions and unsupported options are refused in one sentence that names them.
@pytest.mark.parametrize(
    ("config", "packer", "damage", "message"),
    [
        (
            GPTQ, GPTQ_PACKER, lambda path: set_config(path, None),
            "config.json of {} has no quantization_config for the tensor "
            "model.layers.0.self_attn.q_proj.qweight",
        ),
        (
            GPTQ, packers.gptq(4, 128, symmetric=False, stored_version=1, g_idx=False),
            lambda path: set_config(path, AWQ),
            "the tensor model.layers.0.self_attn.q_proj.qweight in {}/model.safetensors has shape "
            "(8, 64), but config.json says (64, 8) (awq, 4 bits, groups of 64)",
        ),
        (
            GPTQ, GPTQ_PACKER, lambda path: set_config(path, GPTQ | {"bits": 8}),
            "the tensor model.layers.0.self_attn.q_proj.qweight in {}/model.safetensors has shape "
            "(8, 64), but config.json says (16, 64) (gptq, 8 bits, groups of 128)",
        ),
        (
            GPTQ, GPTQ_PACKER, lambda path: set_config(path, GPTQ | {"group_size": 32}),
            "the tensor model.layers.0.self_attn.q_proj.scales in {}/model.safetensors has shape "
            "(1, 64), but config.json says (2, 64) (gptq, 4 bits, groups of 32)",
        ),
        (
            GPTQ, GPTQ_PACKER, lambda path: set_config(path, GPTQ | {"group_size": 16}),
            "{}/config.json: quantization_config: group_size 16 is not supported; supported: -1, "
            "32, 64, 128",
        ),
        (
            GPTQ, GPTQ_PACKER, lambda path: set_config(path, GPTQ | {"bits": 3}),
            "{}/config.json: quantization_config: bits 3 is not supported; supported: 4, 8",
        ),
        (
            GPTQ, GPTQ_PACKER, lambda path: set_config(path, GPTQ | {"sym": True}),
            "model.layers.0.self_attn.q_proj in {}/model.safetensors: quantization_config says "
            "sym, but the values of qzeros differ; set sym to false",
        ),
        (
            GPTQ, GPTQ_PACKER,
            lambda path: set_config(path, GPTQ | {"checkpoint_format": "marlin"}),
            "{}/config.json: quantization_config: checkpoint_format 'marlin' is not supported; "
            "supported: gptq, gptq_v2",
        ),
        (
            GPTQ, GPTQ_PACKER,
            lambda path: set_config(path, GPTQ | {"dynamic": {"+:.*up.*": {"bits": 8}}}),
            "{}/config.json: quantization_config: dynamic options per layer are not supported; "
            "supported: the same bits and group_size for all",
        ),
        (
            GPTQ, GPTQ_PACKER, lambda path: set_config(path, AWQ | {"version": "gemv"}),
            "{}/config.json: quantization_config: version 'gemv' is not supported; supported: gemm",
        ),
        (
            GPTQ, GPTQ_PACKER, lambda path: set_config(path, {"quant_method": "bitsandbytes"}),
            "{}/config.json: quantization_config: quant_method 'bitsandbytes' is not supported; "
            "supported: awq, gptq, compressed-tensors, mxfp4",
        ),
        (
            GPTQ, GPTQ_PACKER, lambda path: with_tensors(path, {f"{DOWN}.scales": None}),
            f"{{}} lacks the tensor {DOWN}.scales",
        ),
        (
            GPTQ, GPTQ_PACKER, spoil(f"{DOWN}.scales", np.nan),
            f"the tensor {DOWN}.scales in {{}}/model.safetensors holds NaN or infinity",
        ),
        (
            GPTQ, GPTQ_PACKER, spoil(f"{DOWN}.scales", np.inf),
            f"the tensor {DOWN}.scales in {{}}/model.safetensors holds NaN or infinity",
        ),
        (
            GPTQ, GPTQ_PACKER, spoil(f"{DOWN}.g_idx", 1),
            f"{DOWN} in {{}}/model.safetensors: g_idx must divide the 172 inputs into groups of "
            "128, but does not",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: with_tensors(path, {f"{DOWN}.weight_shape": np.array([64, 176])}),
            f"{DOWN} in {{}}/model.safetensors: weight_shape is (64, 176), but config.json says "
            "(64, 172)",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"ignore": ["re:.*down_proj", "lm_head"]}),
            f"config.json of {{}} has no quantization_config for the tensor {DOWN}.weight_packed",
        ),
        (
            PACKED, PACKED_PACKER, lambda path: set_config(path, PACKED | {"ignore": ["re:("]}),
            "{}/config.json: quantization_config: the pattern 're:(' is not supported; ",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"format": "mxfp4-pack-quantized"}),
            "{}/config.json: quantization_config: weights.type 'int' is not supported; "
            "supported: float",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"format": "float-quantized"}),
            "{}/config.json: quantization_config: format 'float-quantized' is not supported; "
            "supported: pack-quantized, mxfp4-pack-quantized",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(
                path, packers.compressed_tensors_config(4, 32, True, strategy="tensor")
            ),
            "{}/config.json: quantization_config: weights.strategy 'tensor' is not supported; "
            "supported: group, channel",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"transform_config": {"config_groups": {}}}),
            "{}/config.json: quantization_config: transform_config is not supported",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"config_groups": {"W4A16": {}}}),
            "{}/config.json: quantization_config: the field 'targets' is missing",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"config_groups": {"W4A16": {"targets": None}}}),
            "{}/config.json: quantization_config: the field 'targets' is missing",
        ),
        (
            PACKED, PACKED_PACKER, lambda path: set_config(path, PACKED | {"config_groups": None}),
            "config.json of {} has no quantization_config for the tensor "
            "model.layers.0.self_attn.q_proj.weight_packed",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"config_groups": {"W4A16": ["Linear"]}}),
            "{}/config.json: quantization_config.config_groups.W4A16 must be an object, got "
            "['Linear']",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"ignore": ["re:(a|a)*b"]}),
            "{}/config.json: quantization_config: the pattern 're:(a|a)*b' is not supported; "
            "supported: characters, classes such as [0-9], *, + and ? behind them, and groups such "
            "as (q|k|v)",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"ignore": ["re:" + "a" * 9998]}),
            "{}/config.json: quantization_config: the patterns have 10001 characters; accepted: up "
            "to 10000",
        ),
        (
            PACKED, PACKED_PACKER,
            lambda path: set_config(path, PACKED | {"ignore": ["re:" + "(" * 9997]}),
            "{}/config.json: quantization_config: the pattern 're:(((",
        ),
        (
            GPTQ, GPTQ_PACKER,
            lambda path: with_tensors(path, {f"{DOWN}.bias": np.zeros(64, float8_e4m3fn)}),
            f"{{}} has the tensor {DOWN}.bias, which a llama model with this config.json does not",
        ),
        (
            {"quant_method": "mxfp4"}, packers.mxfp4("weight_blocks", "weight_scales"),
            spoil(f"{DOWN}.weight_scales", 255),
            f"{DOWN} in {{}}/model.safetensors: weight_scales holds 255, the code of NaN",
        ),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(
    tmp_path: Path, config: dict[str, Any], packer: Packer, damage: Callable[[Path], None],
    message: str,
) -> None:  # fmt: skip
    write_quantized(tmp_path, config, all_but_head(packer))
    damage(tmp_path)
    with pytest.raises(ValueError) as refusal:
        load(tmp_path)
    assert str(refusal.value).startswith(message.format(tmp_path))
    assert "\n" not in str(refusal.value)


# A model has a quantization_config, but no quantized tensor.
def test_nothing_is_quantized(tmp_path: Path) -> None:
    write_config(tmp_path, **ODD, quantization_config=GPTQ)
    write_tensors(tmp_path, random_tensors(tmp_path))
    with pytest.raises(ValueError, match="has a quantization_config, but no tensor is quantized"):
        load(tmp_path)
