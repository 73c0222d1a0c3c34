"""Weights that are quantized already, in the formats in which they are published.

A `Layout` knows how one linear layer is stored: its tensors, and the weight that they represent.
Integers, zeros and scales are kept unchanged; nothing is quantized again.

| quant_method | read |
| --- | --- |
| `awq` | version `gemm`, 4 bits |
| `gptq` | formats `gptq` (v1) and `gptq_v2`, 4 and 8 bits, any order of the groups (act-order) |
| `compressed-tensors` | `pack-quantized` with 4 and 8 bits, `mxfp4-pack-quantized` |
| `mxfp4` | blocks and scales |

Formats that follow the layout of a single kernel (Marlin, ExLlama, `gemv`) are left out on purpose.
So are the configuration's lists of layers that are not quantized, except where they say how a layer
is stored: those lists are often wrong, and the tensors show which layers are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from checkpoints_tools.prequantized import awq, compressed_tensors, gptq, mxfp4
from checkpoints_tools.prequantized.layout import Layout, Part
from specjax.checks import shown

__all__ = ["MAIN_PARTS", "Layout", "LayoutOf", "Part", "read_layouts"]

LayoutOf = Callable[[str], Layout | None]  # from a module's name, such as "lm_head"

METHODS: dict[str, Callable[[Mapping[str, Any]], LayoutOf]] = {
    "awq": awq.read_layouts,
    "gptq": gptq.read_layouts,
    "compressed-tensors": compressed_tensors.read_layouts,
    "mxfp4": mxfp4.read_layouts,
}
MAIN_PARTS = ("qweight", "weight_packed", "weight_blocks")  # a module with one is quantized


def read_layouts(fields: Mapping[str, Any]) -> LayoutOf:
    """How the layers of a model are stored, according to its `quantization_config`.

    Args:
      fields: the quantization_config of config.json.

    Returns:
      A function from a module's name to its layout, or None for a module that is not quantized.

    Raises:
      ValueError: the method, its version or an option is not supported.
    """
    method = fields.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"quantization_config: quant_method {shown(method)} is not supported; "
            f"supported: {', '.join(METHODS)}"
        )
    return METHODS[method](fields)
