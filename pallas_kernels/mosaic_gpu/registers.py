"""Operations on registers that Pallas does not offer.

They work on Mosaic GPU's `FragmentedArray`, a matrix spread over the 128 threads of a warpgroup.
Its `registers` are an array of small vectors that each thread holds.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.formats import PLANE
from pallas_kernels.mosaic_gpu.plan import ROWS
from pallas_kernels.words import Decoder

PACKED = plgpu.Layout.WGMMA_8BIT  # how packed bytes are loaded
ACCUMULATOR = plgpu.Layout.WGMMA

Value: TypeAlias = "ir.Value[Any]"


class Word:
    """A 32-bit value of the traced kernel, with the operators of `words.ArrayWord`."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def __and__(self, other: Word | int) -> Word:
        return Word(arith.andi(self.value, _value(other)))

    def __or__(self, other: Word | int) -> Word:
        return Word(arith.ori(self.value, _value(other)))

    def __xor__(self, other: Word | int) -> Word:
        return Word(arith.xori(self.value, _variable(other)))

    def __lshift__(self, bits: int) -> Word:
        return Word(arith.shli(self.value, _value(bits)))

    def __rshift__(self, bits: int) -> Word:
        return Word(arith.shrui(self.value, _value(bits)))

    @staticmethod
    def select_bytes(low: Word | int, high: Word | int, selector: Word | int) -> Word:
        """See `words.select_bytes`."""
        operands = [_value(operand) for operand in (low, high, selector)]
        code, constraints = "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"
        return Word(llvm.InlineAsmOp(_i32(), operands, code, constraints).results[0])


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _value(operand: Word | int) -> Value:
    if isinstance(operand, Word):
        return operand.value
    signed = operand - (1 << 32) if operand >> 31 else operand
    constant: Value = llvm.ConstantOp(_i32(), ir.IntegerAttr.get(_i32(), signed)).result
    return constant


def _variable(operand: Word | int) -> Value:
    """The operand, in a register that ptxas does not know to be constant.

    `(x & constant) ^ constant` takes two instructions, and one where a constant is in a register.
    ptxas would undo a mere copy, so the constant is multiplied by the third size of the grid, 1.
    """
    if isinstance(operand, Word):
        return operand.value
    code = "{ .reg .u32 one; mov.u32 one, %nctaid.z; mul.lo.u32 $0, one, $1; }"
    variable: Value = llvm.InlineAsmOp(_i32(), [_value(operand)], code, "=r,r").results[0]
    return variable


def _word(register: Value) -> Word:
    """A register of four bytes as a word."""
    words = vector.bitcast(ir.VectorType.get((1,), _i32()), register)
    return Word(vector.extract(words, [], [0]))


def _vector(word: Word, count: int, dtype: ir.Type) -> Value:
    """The bits of a word as a vector of `count` values of `dtype`."""
    words = vector.broadcast(ir.VectorType.get((1,), _i32()), word.value)
    values: Value = vector.bitcast(ir.VectorType.get((count,), dtype), words)
    return values


def _splat(value: ir.Attribute, count: int) -> Value:
    """A register with `count` copies of a constant."""
    type_ = ir.VectorType.get((count,), value.type)
    constant: Value = llvm.ConstantOp(type_, ir.DenseElementsAttr.get_splat(type_, value)).result
    return constant


def unpack(
    packed: jax.Array, decoder: Decoder, plane: int, group: int, width: int
) -> list[jax.Array]:
    """Unpacks one plane of a block to the operands of its groups, in input order.

    Args:
      packed: uint8[64, 128] in the layout PACKED.
      decoder: converts words to operands.
      plane: 0 for the low nibbles, 1 for the high ones.
      group: inputs per group.
      width: inputs per operand. Inputs outside the group are zero.

    Returns:
      PLANE / group arrays: int8 or bf16[64, width].
    """
    integer = decoder.dtype == jnp.int8
    layout = PACKED if integer else ACCUMULATOR
    operand = plgpu.ShapeDtypeStruct((ROWS, width), decoder.dtype, layout)

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(PACKED,), return_type=(operand,) * (PLANE // group)
    )
    def run(_: object, array: fa.FragmentedArray) -> tuple[fa.FragmentedArray, ...]:
        registers = _plane(array.registers, decoder, plane)
        return tuple(
            fa.FragmentedArray(
                _registers=part, _layout=layout.to_mgpu(), _is_signed=True if integer else None
            )
            for part in _groups(registers, group, width)
        )

    return list(run(packed))


def _plane(packed: np.ndarray, decoder: Decoder, plane: int) -> np.ndarray:
    """Decodes registers of packed words to those of one plane. Axis 1 runs along the inputs."""
    count = decoder.registers
    columns = packed.shape[1] * count
    registers = np.empty((packed.shape[0], columns, *packed.shape[2:]), object)
    for index, register in np.ndenumerate(packed):
        words = decoder.words(_word(register))[plane * count :][:count]
        for number, word in enumerate(words):
            at = index[0], index[1] * count + number, *index[2:]
            registers[at] = _number(word, decoder)
    return registers


def _number(word: Word, decoder: Decoder) -> Value:
    """One operand register: four int8 or two bfloat16 numbers."""
    if decoder.dtype == jnp.int8:
        return _vector(word, 4, ir.IntegerType.get_signless(8))
    bf16 = ir.BF16Type.get()
    value = _vector(word, 2, bf16)
    if decoder.offset:
        value = arith.subf(value, _splat(ir.FloatAttr.get(bf16, decoder.offset), 2))
    if decoder.multiplier != 1:
        value = arith.mulf(value, _splat(ir.FloatAttr.get(bf16, decoder.multiplier), 2))
    return value


def _zeros() -> Value:
    """A register of four int8 zeros."""
    return _splat(ir.IntegerAttr.get(ir.IntegerType.get_signless(8), 0), 4)


def _groups(plane: np.ndarray, group: int, width: int) -> list[np.ndarray]:
    """Splits a plane's registers into operands by group, with zeros around narrow groups."""
    per_group = plane.shape[1] * group // PLANE
    per_operand = plane.shape[1] * width // PLANE
    parts = []
    for begin in range(0, plane.shape[1], per_group):
        first = begin // per_operand * per_operand
        part = plane[:, first : first + per_operand].copy()
        for column in range(per_operand):
            if not begin <= first + column < begin + per_group:
                part[:, column] = _zeros()
        parts.append(part)
    return parts


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """Computes x · y + z with one rounding.

    All arrays are f32[64, M] in the layout ACCUMULATOR.
    """
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), ACCUMULATOR)

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(ACCUMULATOR,) * 3, return_type=result
    )
    def run(
        _: object, x: fa.FragmentedArray, y: fa.FragmentedArray, z: fa.FragmentedArray
    ) -> fa.FragmentedArray:
        registers = np.empty_like(z.registers)
        for i in np.ndindex(registers.shape):
            operands: list[Value] = [array.registers.item(*i) for array in (x, y, z)]
            registers[i] = math.fma(*operands)
        return fa.FragmentedArray(_registers=registers, _layout=z.layout, _is_signed=None)

    sums: jax.Array = run(x, y, z)
    return sums
