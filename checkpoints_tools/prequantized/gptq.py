"""GPTQ checkpoints (Frantar et al. 2022): 4- or 8-bit weights, inputs first.

    qweight  i32[K · bits / 32, N]        a word holds consecutive inputs, the first lowest
    qzeros   i32[groups, N · bits / 32]   a word holds consecutive outputs
    scales   f16[groups, N]
    g_idx    i32[K]                       the group of every input; consecutive if absent

Version 1 stores every zero minus one, modulo 2^bits. Version 2 ("gptq_v2") stores it unchanged.
Some symmetric checkpoints of version 2 bear the name of version 1. All their zeros must be
2^(bits - 1), so the stored value shows the version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints_tools.prequantized.layout import (
    BITS,
    INTEGERS,
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
from checkpoints_tools.tensor_files import FLOATS
from pallas_kernels.formats import Quantized

VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclasses.dataclass(frozen=True)
class GptqLayout:
    """One layer's layout.

    group_size: inputs per scale, None for one scale per output.
    version: 1 or 2, how zeros are stored.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    version: int
    main_part: str = "qweight"

    @property
    def description(self) -> str:
        return describe("gptq", self.bits, self.group_size)

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        count = groups(k, self.group_size)
        return {
            "qweight": Part((words(k, self.bits), n), INTEGERS),
            "scales": Part((count, n), FLOATS),
            "qzeros": Part((count, words(n, self.bits)), INTEGERS),
            "g_idx": Part((k,), INTEGERS, optional=True),
        }

    def weight(self, parts: Mapping[str, np.ndarray], n: int, k: int) -> Quantized:
        q = signed(unpack_integers(parts["qweight"].T, self.bits, k), self.bits)
        group_of_input = parts.get("g_idx")
        return build(
            self.bits,
            q,
            parts["scales"].T,
            self.group_size,
            self._zeros(unpack_integers(parts["qzeros"], self.bits, n)),
            None if group_of_input is None else column_order(group_of_input, self.group_size),
        )

    def _zeros(self, stored: np.ndarray) -> np.ndarray | None:
        """u8[groups, N] -> i8[N, groups], or None if all are the middle of the range."""
        middle = 1 << self.bits - 1
        if self.symmetric:
            if not ((stored == middle).all() or (stored == middle - 1).all()):
                raise ValueError(
                    "quantization_config says sym, but the values of qzeros differ; "
                    "set sym to false"
                )
            return None
        if self.version == 1:
            stored = (stored + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
        return signed(stored.T, self.bits)


def read_layouts(fields: Mapping[str, Any]) -> Callable[[str], GptqLayout]:
    """The same layout for every layer. Raises ValueError on an option that is not supported."""
    version = str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()
    check_option("checkpoint_format", version, tuple(VERSIONS))
    check_option("bits", fields.get("bits"), BITS)
    if any((fields.get("dynamic") or {}).values()):
        raise ValueError(
            "quantization_config: dynamic options per layer are not supported; "
            "supported: the same bits and group_size for all"
        )
    layout = GptqLayout(
        fields["bits"],
        read_group_size(fields.get("group_size", 128)),
        symmetric=fields.get("sym") is not False,
        version=VERSIONS[version],
    )
    return lambda module: layout
