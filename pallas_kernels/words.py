"""Converts packed nibbles to the tensor cores' operands, one 32-bit word at a time.

Kernels of both GPU packages use the decoders. A warpgroup of `mosaic_gpu` loads 64 × 128 packed
bytes as words: thread t of a row (t = 0 … 3) holds bytes 4t … 4t + 3 of every 16. The same words
become the left operand of `wgmma`:

int8: bytes keep their places, so operand k is input k. The integers of an Int4Weight stay in the
    upper half of their bytes, 16 times too large (`Decoder.factor`). This saves the sign extension
    and takes two operations for eight weights.
bf16: a register holds two numbers. One bitwise operation turns two nibbles, 16 bits apart, into
    128 + (q + 8) each, because 128 + n is 0x4300 + n in bfloat16. Subtracting 136 is exact. Bytes 0
    and 2 of a word form one register, bytes 1 and 3 the next. Operand k is then not input k, so
    `permute_inputs` reorders x, which is much smaller than the weight.

The functions accept `ArrayWord`, for tests and interpret mode, or a value of the traced kernel:
`mosaic_gpu.registers.Word` or `triton_gpu.word.Word`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Twice the E2M1 values by code, and their negatives.
_E2M1 = (0x03020100, 0x0C080604)
_E2M1_NEGATED = (0xFDFEFF00, 0xF4F8FAFC)
# The low and the high bytes of the same values in bfloat16.
_TWICE_LOW = (0x40008000, 0x4000C080)
_TWICE_HIGH = (0x40403F00, 0x41414040)


def _int4_bf16(word: Any) -> list[Any]:
    """Decodes integers to registers of two bfloat16 numbers q + 136: low plane, high plane."""
    return [((word >> shift) & 0x000F000F) ^ 0x43084308 for shift in (0, 8, 4, 12)]


def _int4_int8(word: Any) -> list[Any]:
    """Decodes integers to four int8 numbers 16 · q: low plane, high plane."""
    return [(word << 4) & 0xF0F0F0F0, word & 0xF0F0F0F0]


def _mxfp4_bf16(word: Any) -> list[Any]:
    """Decodes E2M1 to registers of two bfloat16 numbers 2^-126 · value: low plane, high plane.

    Shifts move sign, exponent and mantissa to their bfloat16 places. E2M1's subnormal becomes a
    bfloat16 subnormal.
    """
    shifted = [word >> shift for shift in (0, 8, 4, 12)]
    return [((v & 0x00070007) << 6) | ((v & 0x00080008) << 12) for v in shifted]


def _mxfp4_int8(word: Any) -> list[Any]:
    """Decodes E2M1 to four int8 numbers of twice the value: low plane, high plane."""
    codes, low_signs, select_bytes = word & 0x77777777, word << 4, word.select_bytes
    halves = []
    for shift, signs in ((0, 0xD9C8), (16, 0xFBEA)):  # bytes 0 and 1, then 2 and 3
        positive = select_bytes(*_E2M1, codes >> shift)
        negative = select_bytes(*_E2M1_NEGATED, codes >> shift)
        mask = select_bytes(low_signs, word, signs)
        halves.append(positive ^ ((positive ^ negative) & mask))
    return [select_bytes(*halves, order) for order in (0x6420, 0x7531)]


def twice_e2m1(word: Any) -> list[Any]:
    """Decodes E2M1 to registers of two bfloat16 numbers of twice the value, neighbours in a plane:
    low plane, high plane."""
    codes, low_signs, select_bytes = word & 0x77777777, word << 4, word.select_bytes
    planes: tuple[list[Any], list[Any]] = [], []
    for shift, places in ((0, 0x5140), (16, 0x7362)):  # bytes 0 and 1, then 2 and 3
        low = select_bytes(*_TWICE_LOW, codes >> shift)
        high = select_bytes(*_TWICE_HIGH, codes >> shift)
        high = high | (select_bytes(low_signs, word, places) & 0x80808080)
        for plane, order in zip(planes, (0x6240, 0x7351), strict=True):
            plane.append(select_bytes(low, high, order))
    return planes[0] + planes[1]


class ArrayWord:
    """A uint32 JAX array with the operators that the decoders use.

    `mosaic_gpu.registers.Word` has the same operators for a value of the traced kernel.
    """

    def __init__(self, value: jax.Array | int) -> None:
        self.value = jnp.asarray(value, jnp.uint32)

    def __and__(self, other: ArrayWord | int) -> ArrayWord:
        return type(self)(self.value & _array(other))

    def __or__(self, other: ArrayWord | int) -> ArrayWord:
        return type(self)(self.value | _array(other))

    def __xor__(self, other: ArrayWord | int) -> ArrayWord:
        return type(self)(self.value ^ _array(other))

    def __lshift__(self, bits: int) -> ArrayWord:
        return type(self)(self.value << bits)

    def __rshift__(self, bits: int) -> ArrayWord:
        return type(self)(self.value >> bits)

    @staticmethod
    def select_bytes(
        low: ArrayWord | int, high: ArrayWord | int, selector: ArrayWord | int
    ) -> ArrayWord:
        """PTX's `prmt`: nibble i of the selector chooses byte i of the result.

        0 … 3 choose a byte of `low` and 4 … 7 a byte of `high`. 8 … 15 fill the byte with the sign
        of byte 0 … 7.
        """
        result = jnp.uint32(0)
        for i in range(4):
            choice = _array(selector) >> (4 * i)
            source = jnp.where(choice & 4 > 0, _array(high), _array(low))
            byte = source >> (8 * (choice & 3)) & 0xFF
            byte = jnp.where(choice & 8 > 0, (byte >> 7) * 0xFF, byte)
            result |= byte << (8 * i)
        return ArrayWord(result)


def _array(operand: ArrayWord | int) -> jax.Array:
    return operand.value if isinstance(operand, ArrayWord) else jnp.uint32(operand)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Converts the words of a format to operands of one dtype.

    words: maps a word to the registers of its low plane, then of its high plane.
    dtype: int8 or bfloat16.
    offset: subtracted from the bfloat16 numbers, exactly.
    multiplier: a power of two that then multiplies them, exactly.
    factor: the ratio of the operands to the format's integers (`formats.integers`).
    """

    words: Callable[[Any], list[Any]]
    dtype: jnp.dtype
    offset: float = 0
    multiplier: float = 1
    factor: int = 1

    @property
    def registers(self) -> int:
        """Registers per word and plane."""
        return self.dtype.itemsize


INT4_BF16 = Decoder(_int4_bf16, jnp.dtype(jnp.bfloat16), offset=136)
INT4_INT8 = Decoder(_int4_int8, jnp.dtype(jnp.int8), factor=16)
MXFP4_BF16 = Decoder(_mxfp4_bf16, jnp.dtype(jnp.bfloat16), multiplier=2.0**127)
MXFP4_INT8 = Decoder(_mxfp4_int8, jnp.dtype(jnp.int8))


def unpack(
    packed: jax.Array, decoder: Decoder, plane: int, group: int, width: int
) -> list[jax.Array]:
    """`registers.unpack` in JAX: uint8[N, 128] -> int8 or bf16[N, width] per group."""
    n, bytes_ = packed.shape
    word = ArrayWord(lax.bitcast_convert_type(packed.reshape(n, -1, 4), jnp.uint32))
    registers = decoder.words(word)[plane * decoder.registers :][: decoder.registers]
    values = jnp.stack([register.value for register in registers], axis=-1)
    values = _values(values, decoder).reshape(n, bytes_)
    parts = []
    for begin in range(0, bytes_, group):
        own = jnp.where(jnp.arange(bytes_) // group == begin // group, values, 0)
        first = begin // width * width
        parts.append(own[:, first : first + width])
    return parts


def _values(registers: jax.Array, decoder: Decoder) -> jax.Array:
    """uint32[N, words, registers] -> int8 or bf16 numbers in operand order."""
    if decoder.dtype == jnp.int8:
        return lax.bitcast_convert_type(registers, jnp.int8)
    n, _, count = registers.shape
    # Each of four threads holds one register of every 8 operands.
    registers = registers.reshape(n, -1, 4, count).swapaxes(2, 3)
    bits = lax.bitcast_convert_type(registers, jnp.uint16).astype(jnp.int32)
    exponent, scale = bits >> 7 & 0xFF, int(math.log2(decoder.multiplier))
    # A plain conversion could flush subnormal numbers to zero on a CPU.
    mantissa = (bits & 0x7F) + jnp.where(exponent > 0, 0x80, 0)
    magnitude = jnp.ldexp(mantissa.astype(jnp.float32), jnp.maximum(exponent, 1) - 134 + scale)
    return (jnp.where(bits >> 15 > 0, -magnitude, magnitude) - decoder.offset).astype(jnp.bfloat16)


def permute_inputs(x: jax.Array) -> jax.Array:
    """Reorders x: bf16[M, K] for bf16 operands: input 4t + 2c + j of 16 moves to 8j + 2t + c."""
    bytes_ = x.reshape(x.shape[0], -1, 4, 2, 2)
    return bytes_.transpose(0, 1, 4, 2, 3).reshape(x.shape)


def permuted_place(inputs: jax.Array) -> jax.Array:
    """The places to which `permute_inputs` moves inputs: int32[...]."""
    return inputs & ~15 | (inputs & 1) << 3 | (inputs & 12) >> 1 | (inputs & 2) >> 1
