"""MXFP4 checkpoints (OCP Microscaling): two E2M1 codes per byte, one E8M0 scale per 32 inputs.

    Hugging Face         weight_blocks u8[N, groups, 16], weight_scales u8[N, groups]
    compressed-tensors   weight_packed u8[N, K / 2],      weight_scale  u8[N, groups]

The low nibble comes first. Hugging Face uses these names in its mixtures of experts, after the name
of the parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_tools.prequantized.layout import Part, groups, unpack_integers
from pallas_kernels.formats import MXFP4_GROUP, Quantized, mxfp4_from_codes

BYTES = ("U8",)
NAN = 255  # of E8M0


@dataclasses.dataclass(frozen=True)
class Mxfp4Layout:
    """One layer's layout.

    main_part, scales: the names of the two tensors.
    blocks: whether the bytes of a block have their own axis.
    """

    main_part: str
    scales: str
    blocks: bool
    description: str = "mxfp4"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        count = groups(k, MXFP4_GROUP)
        shape = (n, count, MXFP4_GROUP // 2) if self.blocks else (n, -(-k // 2))
        return {self.main_part: Part(shape, BYTES), self.scales: Part((n, count), BYTES)}

    def weight(self, parts: Mapping[str, np.ndarray], n: int, k: int) -> Quantized:
        scales = parts[self.scales]
        if (scales == NAN).any():
            raise ValueError(f"{self.scales} holds {NAN}, the code of NaN")
        codes = unpack_integers(parts[self.main_part].reshape(n, -1), 4, k)
        return mxfp4_from_codes(jnp.asarray(codes), jnp.asarray(scales))


HUGGINGFACE = Mxfp4Layout("weight_blocks", "weight_scales", blocks=True)
COMPRESSED_TENSORS = Mxfp4Layout("weight_packed", "weight_scale", blocks=False)


def read_layouts(fields: Mapping[str, Any]) -> Callable[[str], Mxfp4Layout]:
    """The same layout for every layer. It has no options."""
    return lambda module: HUGGINGFACE
