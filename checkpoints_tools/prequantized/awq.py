"""AWQ checkpoints, layout `gemm` (Lin et al. 2023): asymmetric 4-bit weights, inputs first.

    qweight  i32[K, N / 8]       eight outputs per word
    qzeros   i32[groups, N / 8]  likewise; the zeros are stored unchanged
    scales   f16[groups, N]

The nibbles of a word are not in the order of its outputs: nibble i holds output NIBBLES[i].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints_tools.prequantized.layout import (
    INTEGERS,
    Part,
    build,
    check_option,
    describe,
    groups,
    read_group_size,
    signed,
    unpack_integers,
    words,
)
from checkpoints_tools.tensor_files import FLOATS
from pallas_kernels.formats import Quantized

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class AwqLayout:
    """One layer's layout.

    group_size: inputs per scale, None for one scale per output.
    zeros: whether there is a tensor of zeros.
    """

    group_size: int | None
    zeros: bool
    main_part: str = "qweight"

    @property
    def description(self) -> str:
        return describe("awq", 4, self.group_size)

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        count, width = groups(k, self.group_size), words(n, 4)
        return {
            "qweight": Part((k, width), INTEGERS),
            "scales": Part((count, n), FLOATS),
            "qzeros": Part((count, width), INTEGERS, optional=not self.zeros),
        }

    def weight(self, parts: Mapping[str, np.ndarray], n: int, k: int) -> Quantized:
        zeros = parts.get("qzeros")
        return build(
            4,
            _integers(parts["qweight"], n),
            parts["scales"].T,
            self.group_size,
            None if zeros is None else _integers(zeros, n),
        )


def _integers(packed: np.ndarray, n: int) -> np.ndarray:
    """i32[R, N / 8] -> i8[N, R]."""
    nibbles = unpack_integers(packed, 4, 8 * packed.shape[1]).reshape(len(packed), -1, 8)
    outputs = nibbles[:, :, np.argsort(NIBBLES)].reshape(len(packed), -1)
    return signed(outputs[:, :n].T, 4)


def read_layouts(fields: Mapping[str, Any]) -> Callable[[str], AwqLayout]:
    """The same layout for every layer. Raises ValueError on an option that is not supported."""
    version = str(fields.get("version") or fields.get("format") or "gemm").lower()
    check_option("version", version, ("gemm",))
    check_option("bits", fields.get("bits", 4), (4,))
    layout = AwqLayout(
        read_group_size(fields.get("group_size", 128)), fields.get("zero_point") is not False
    )
    return lambda module: layout
