"""The weights in GGUF's blocks.

A block holds 32 weights, or 256 in the formats that end in K. Where one of the library's formats
can hold the same values exactly, the weight stays as small as it was:

| ggml | held as |
| --- | --- |
| Q4_0 | `Int4Weight`, groups of 32, float16 scales |
| Q4_1 | `Int4Weight`, groups of 32, float16 scales and minima |
| Q4_K | `Int4Weight`, groups of 32, float32 scales and minima |
| Q5_0, Q8_0 | `Int8Weight`, groups of 32, float16 scales |
| Q5_1 | `Int8Weight`, groups of 32, float16 scales and minima |
| Q5_K | `Int8Weight`, groups of 32, float32 scales and minima |
| MXFP4 | `Mxfp4Weight` |
| F32, F16, BF16 | an array |
| others, such as Q6_K | a float32 array, which a model in bfloat16 rounds |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.formats import (
    Quantized,
    int4_from_integers,
    int8_from_integers,
    mxfp4_from_codes,
)

if TYPE_CHECKING:
    import gguf

GROUP = 32
Blocks = np.ndarray  # uint8[N, blocks of a row, bytes of a block]


def _halves(blocks: Blocks, start: int, count: int = 1) -> np.ndarray:
    """float16 numbers from byte `start` on: f16[N, blocks, count]."""
    return np.ascontiguousarray(blocks[..., start : start + 2 * count]).view(np.float16)


def _nibbles(codes: Blocks) -> np.ndarray:
    """The low nibbles of all bytes, then the high ones: uint8[…, P] -> uint8[…, 2 · P]."""
    return np.concatenate((codes & 15, codes >> 4), axis=-1)


def _fifth_bits(blocks: Blocks, start: int) -> np.ndarray:
    """The bits of four bytes, lowest first, as 16 or 0: uint8[N, blocks, 32]."""
    return np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little") << 4


def _rows(values: np.ndarray) -> jax.Array:
    """[N, blocks, …] -> [N, everything else]. (`jnp.asarray` would compile a program per shape.)"""
    rows: jax.Array = jax.device_put(values.reshape(len(values), -1))
    return rows


def _int4(q: np.ndarray, scales: np.ndarray, minima: np.ndarray | None = None) -> Quantized:
    """q: uint8[N, …] in 0 … 15. Without minima, 8 stands for zero."""
    lowest = None if minima is None else _rows(minima)
    integers = _rows(q.astype(np.int8) - np.int8(8))
    return int4_from_integers(integers, _rows(scales), GROUP, minima=lowest)


def _int8(q: np.ndarray, scales: np.ndarray, minima: np.ndarray | None = None) -> Quantized:
    """q: int8[N, …]. With minima, -128 stands for the minimum."""
    lowest = None if minima is None else _rows(minima)
    return int8_from_integers(_rows(q), _rows(scales), GROUP, minima=lowest)


def _q4_0(blocks: Blocks) -> Quantized:
    return _int4(_nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: Blocks) -> Quantized:
    return _int4(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Blocks) -> Quantized:
    q = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _int8(q.astype(np.int8) - np.int8(16), _halves(blocks, 0))


def _q5_1(blocks: Blocks) -> Quantized:
    q = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _int8((q ^ 0x80).view(np.int8), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Blocks) -> Quantized:
    return _int8(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _halves(blocks, 0))


def _q4_k(blocks: Blocks) -> Quantized:
    scales, minima = _k_scales(blocks)
    return _int4(_nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)), scales, minima)


def _q5_k(blocks: Blocks) -> Quantized:
    scales, minima = _k_scales(blocks)
    q = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [N, blocks, 32, 8]
    fifth = np.moveaxis(bits, -1, -2).reshape(q.shape) << 4
    return _int8(((q | fifth) ^ 0x80).view(np.int8), scales, minima)


def _k_scales(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of eight groups of 32: f32[N, blocks, 8] twice.

    They are 6-bit integers times two float16 numbers, which float32 holds exactly. Twelve bytes
    hold the integers: the lower six bits of bytes 0 … 3 and 4 … 7 are the first four of each kind,
    and their upper two bits belong to the last four, whose lower four bits are nibbles of the rest.
    """
    one, two, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    factors = np.concatenate((one & 63, (rest & 15) | (one >> 6 << 4)), axis=-1)
    offsets = np.concatenate((two & 63, (rest >> 4) | (two >> 6 << 4)), axis=-1)
    units = _halves(blocks, 0, 2).astype(np.float32)
    return units[..., :1] * factors, -(units[..., 1:] * offsets)


def _mxfp4(blocks: Blocks) -> Quantized:
    codes = _nibbles(blocks[..., 1:])
    return mxfp4_from_codes(_rows(codes), _rows(blocks[..., :1]))


EXACT: dict[str, Callable[[Blocks], Quantized]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "MXFP4": _mxfp4,
}  # fmt: skip
# The formats of `specjax.model.sizes` that these are.
HELD_AS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q8_0"), "int8"),
    "MXFP4": "mxfp4",
}
PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def to_weight(
    raw: np.ndarray, kind: gguf.GGMLQuantizationType, row_bytes: int
) -> jax.Array | Quantized:
    """Converts the bytes of a file to a weight.

    Args:
      raw: uint8[N, row_bytes] for a matrix; uint8[row_bytes] for a vector.
      kind: the blocks' format.
      row_bytes: bytes per row.

    Returns:
      A quantized weight with the same values; or an array [N, K] or [K], in float32 where no format
      of the library holds them.

    Raises ValueError if the `gguf` package does not read the format either.
    """
    import gguf

    if kind.name in PLAIN:
        return jnp.asarray(np.ascontiguousarray(raw).view(PLAIN[kind.name]))
    if kind.name in EXACT and raw.ndim == 2:
        size = gguf.GGML_QUANT_SIZES[kind][1]
        return EXACT[kind.name](raw.reshape(len(raw), row_bytes // size, size))
    try:
        return jnp.asarray(gguf.quants.dequantize(raw, kind))
    except NotImplementedError:
        raise ValueError(f"weights in {kind.name} are not supported") from None
