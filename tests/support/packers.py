"""Packs quantized layers, and models of them, by the definitions of other projects' layouts.

Every packer returns the tensors of one layer by their names in the module, and their values by the
format's definition: f32[N, K].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.hf_directories import FIELDS, random_tensors, write_config, write_tensors

Layer = tuple[dict[str, np.ndarray], np.ndarray]
Packer = Callable[[np.random.Generator, int, int], Layer]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
EVEN = {"num_hidden_layers": 1, "intermediate_size": 192}  # sizes that AWQ can pack
ODD = {"num_hidden_layers": 1, "intermediate_size": 172}  # not a multiple of a group or a word


def words(fields: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Puts integer c of a row into field places[c % per word] of word c // per word."""
    per_word = 32 // bits
    places = places or tuple(range(per_word))
    rows, columns = fields.shape
    packed = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        place = places[column % per_word]
        packed[:, column // per_word] |= fields[:, column].astype(np.uint32) << bits * place
    return packed.view(np.int32)


def random_layer(
    rng: np.random.Generator, n: int, k: int, bits: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned integers [N, K], zeros [N, G], scales [N, G] and the group of every input [K]."""
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    scales = rng.uniform(0.002, 0.02, (n, groups)).astype(np.float16)
    scales[0, 0] = 0  # quantizers store a group of zeros like this
    zeros = rng.integers(0, 1 << bits, (n, groups))
    zeros[0, 0], zeros[-1, -1] = 0, (1 << bits) - 1
    return rng.integers(0, 1 << bits, (n, k)), zeros, scales, np.arange(k) // size


def values(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(q - zero) · scale, with each input's zero and scale by group."""
    return (q - zeros[:, group]).astype(np.float32) * scales[:, group].astype(np.float32)


def awq(group_size: int, zero_point: bool = True) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> Layer:
        q, zeros, scales, group = random_layer(rng, n, k, 4, group_size)
        # Nibble 0 holds output 0, nibble 4 output 1, nibble 1 output 2, …
        places = (0, 4, 1, 5, 2, 6, 3, 7)
        tensors = {"qweight": words(q.T, 4, places), "scales": np.ascontiguousarray(scales.T)}
        if zero_point:
            tensors["qzeros"] = words(zeros.T, 4, places)
        else:
            zeros = np.full_like(zeros, 8)
        return tensors, values(q, zeros, scales, group)

    return pack


def gptq(
    bits: int, group_size: int, *, symmetric: bool, stored_version: int,
    act_order: bool = False, g_idx: bool = True, bias: bool = False,
) -> Packer:  # fmt: skip
    def pack(rng: np.random.Generator, n: int, k: int) -> Layer:
        q, zeros, scales, group = random_layer(rng, n, k, bits, group_size)
        if symmetric:
            zeros = np.full_like(zeros, 1 << bits - 1)
        if act_order:
            group = rng.permutation(group)
        stored = zeros if stored_version == 2 else (zeros - 1) % (1 << bits)
        tensors = {
            "qweight": np.ascontiguousarray(words(q, bits).T),
            "qzeros": words(stored.T, bits),
            "scales": np.ascontiguousarray(scales.T),
        }
        if g_idx:
            tensors["g_idx"] = group.astype(np.int32)
        if bias:
            tensors["bias"] = np.zeros(n, np.float16)
        return tensors, values(q, zeros, scales, group)

    return pack


def compressed_tensors(
    bits: int, group_size: int, *, symmetric: bool, g_idx: bool = False
) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> Layer:
        q, zeros, scales, group = random_layer(rng, n, k, bits, group_size)
        if g_idx:
            group = rng.permutation(group)
        if symmetric:
            zeros = np.full_like(zeros, 1 << bits - 1)
        tensors = {
            "weight_packed": words(q, bits),
            "weight_scale": scales,
            "weight_shape": np.array([n, k], np.int64),
        }
        if g_idx:
            tensors["weight_g_idx"] = group.astype(np.int32)
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
        return tensors, values(q, zeros, scales, group)

    return pack


def mxfp4(blocks: str, scales_name: str) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> Layer:
        codes = rng.integers(0, 16, (n, -(-k // 32) * 32), dtype=np.uint8)
        codes[:, k:] = 0
        exponents = rng.integers(118, 124, (n, codes.shape[1] // 32), dtype=np.uint8)
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        if blocks == "weight_blocks":
            pairs = pairs.reshape(n, -1, 16)
        else:
            pairs = np.ascontiguousarray(pairs[:, : -(-k // 2)])
        scales = np.exp2(exponents.astype(np.float32) - 127).repeat(32, axis=1)
        return {blocks: pairs, scales_name: exponents}, (E2M1[codes] * scales)[:, :k]

    return pack


def compressed_tensors_config(
    bits: int, group_size: int, symmetric: bool, **changes: Any
) -> dict[str, Any]:
    """A quantization_config for all layers but the head."""
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | changes}},
    }  # fmt: skip


PACKED = compressed_tensors_config(4, 32, True)


def modules(fields: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(N, K) of a Llama's linear layers by Hugging Face name, the head last."""
    fields = FIELDS | fields
    d, f = fields["hidden_size"], fields["intermediate_size"]
    keys = d // fields["num_attention_heads"] * fields["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (d, d), "self_attn.k_proj": (keys, d), "self_attn.v_proj": (keys, d),
        "self_attn.o_proj": (d, d), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }  # fmt: skip
    layers = range(fields["num_hidden_layers"])
    return {f"model.layers.{i}.{name}": shape for i in layers for name, shape in shapes.items()} | {
        "lm_head": (fields["vocab_size"], d)
    }


def write_quantized(
    path: Path,
    config: Mapping[str, Any],
    packer_of: Callable[[str], Packer | None],
    fields: Mapping[str, Any] = ODD,
    shards: int = 1,
) -> dict[str, np.ndarray]:
    """Writes a directory with quantized layers and returns their values.

    packer_of: maps a layer's name to its packer, or None if the layer is not quantized.
    """
    write_config(path, **fields, quantization_config=dict(config))
    rng, tensors, values = np.random.default_rng(7), random_tensors(path), {}
    for module, (n, k) in modules(fields).items():
        packer = packer_of(module)
        if packer is not None:
            tensors.pop(f"{module}.weight", None)  # a tied head has no tensor
            parts, values[module] = packer(rng, n, k)
            tensors |= {f"{module}.{part}": array for part, array in parts.items()}
    write_tensors(path, tensors, shards)
    return values


def all_but_head(packer: Packer) -> Callable[[str], Packer | None]:
    return lambda module: None if module == "lm_head" else packer


def with_tensors(path: Path, changes: Mapping[str, np.ndarray | None]) -> None:
    """Sets tensors in a directory with one file, and removes those that are None."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({n: a for n, a in tensors.items() if a is not None}, path / "model.safetensors")
