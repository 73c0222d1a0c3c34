"""Checkpoints of the package compressed-tensors: one layout per group of layers.

`pack-quantized`:

    weight_packed      i32[N, K · bits / 32]        consecutive inputs, the first lowest
    weight_scale       bf16, f16 or f32[N, groups]
    weight_zero_point  i32[N · bits / 32, groups]   asymmetric weights only: consecutive outputs
    weight_shape       i64[2]                       (N, K)
    weight_g_idx       i32[K]                       old versions with actorder "group" only

Integers are signed. 2^(bits - 1) is added to them and to the zeros before packing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import numpy as np

from checkpoints_tools.prequantized.layout import (
    BITS,
    INTEGERS,
    Layout,
    Part,
    build,
    check_option,
    column_order,
    describe,
    groups,
    read_group_size,
    signed,
    unpack_integers,
    words,
)
from checkpoints_tools.prequantized.mxfp4 import COMPRESSED_TENSORS as MXFP4
from checkpoints_tools.prequantized.patterns import PATTERN, compile_patterns
from checkpoints_tools.tensor_files import FLOATS
from pallas_kernels.formats import Quantized

FORMATS = {"pack-quantized": "int", "mxfp4-pack-quantized": "float"}  # by format, the weights' type
STRATEGIES = ("group", "channel")


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """One layer's layout.

    group_size: inputs per scale, None for one scale per output.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    main_part: str = "weight_packed"

    @property
    def description(self) -> str:
        return describe("compressed-tensors pack-quantized", self.bits, self.group_size)

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        count = groups(k, self.group_size)
        parts = {
            "weight_packed": Part((n, words(k, self.bits)), INTEGERS),
            "weight_scale": Part((n, count), FLOATS),
            "weight_shape": Part((2,), ("I64", "I32")),
            "weight_g_idx": Part((k,), INTEGERS, optional=True),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = Part((words(n, self.bits), count), INTEGERS)
        return parts

    def weight(self, parts: Mapping[str, np.ndarray], n: int, k: int) -> Quantized:
        if tuple(parts["weight_shape"]) != (n, k):
            raise ValueError(
                f"weight_shape is {tuple(parts['weight_shape'].tolist())}, "
                f"but config.json says {(n, k)}"
            )
        zeros, group_of_input = parts.get("weight_zero_point"), parts.get("weight_g_idx")
        return build(
            self.bits,
            self._integers(parts["weight_packed"], k),
            parts["weight_scale"],
            self.group_size,
            None if zeros is None else self._integers(zeros.T, n).T,
            None if group_of_input is None else column_order(group_of_input, self.group_size),
        )

    def _integers(self, packed: np.ndarray, count: int) -> np.ndarray:
        return signed(unpack_integers(packed, self.bits, count), self.bits)


def read_layouts(fields: Mapping[str, Any]) -> Callable[[str], Layout | None]:
    """The layout of every layer. Raises ValueError on an option that is not supported."""
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.get(name):
            raise ValueError(f"quantization_config: {name} is not supported")
    sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
    check_option("sparsity_config.format", sparsity, ("dense",))
    layouts = {
        target: _layout(scheme, fields.get("format"))
        for scheme in (fields.get("config_groups") or {}).values()
        for target in _needed(scheme, "targets")
    }
    ignored = dict.fromkeys(fields.get("ignore") or [])
    patterns = [name for name in (*layouts, *ignored) if name.startswith(PATTERN)]
    tests = compile_patterns(patterns)

    def matching(names: Container[str], module: str) -> Iterator[str]:
        return (name for name, test in tests.items() if name in names and test(module))

    def layout_of(module: str) -> Layout | None:
        if {"Linear", module} & ignored.keys() or any(matching(ignored, module)):
            return None
        # A layer's own name takes precedence over a pattern, and a pattern over the class.
        names = (module, *matching(layouts, module), "Linear")
        return next((layouts[name] for name in names if name in layouts), None)

    return layout_of


def _needed(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field; null means that it is absent. Raises ValueError if it is."""
    if fields.get(name) is None:
        raise ValueError(f"quantization_config: the field {name!r} is missing")
    return fields[name]


def _layout(scheme: Mapping[str, Any], default_format: str | None) -> Layout:
    weights = _needed(scheme, "weights")
    name: Any = scheme.get("format") or default_format
    check_option("format", name, tuple(FORMATS))
    check_option("weights.type", weights.get("type", "int"), (FORMATS[name],))
    if name == "mxfp4-pack-quantized":
        return MXFP4
    check_option("weights.num_bits", weights.get("num_bits"), BITS)
    check_option("weights.strategy", weights.get("strategy"), STRATEGIES)
    per_output = weights["strategy"] == "channel"
    group_size = None if per_output else read_group_size(weights.get("group_size"))
    return PackedLayout(weights["num_bits"], group_size, weights.get("symmetric") is not False)
