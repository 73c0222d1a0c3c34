"""How products for NVIDIA GPUs read x: 16-bit values, or integers with their scales.

`read` brings x into that form. XLA would take a launch for the largest magnitudes, one for the
scales and one for the integers; a kernel takes one. A kernel that computes x can store it in that
form itself (`Reading.store`), which saves the launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import words
from pallas_kernels.activations import LEVELS, Activation
from pallas_kernels.formats import BLOCK, padded_inputs
from pallas_kernels.triton_gpu.segments import whole

PER_PROGRAM = 1024  # inputs

Operand = tuple[jax.Array, ...]  # x as a product reads it: `Reading.shapes`


@dataclasses.dataclass(frozen=True)
class Reading:
    """The form in which a product reads x: [M, K].

    activation: of the product.
    inputs: K.
    rows: those of the operand. Zeros follow x's own.
    padded: whether zeros fill the inputs up to whole blocks; integers always are.
    permuted: whether 16-bit values are in the order of `words.permute_inputs`; needs `padded`.
    group_size: inputs per scale; None for one scale per row.
    per_block: rows of the scales for each block of inputs; None for as many as needed.
    sums: multiplies the sums of a block's groups of integers, which follow its scales; 0 for none.
    """

    activation: Activation
    inputs: int
    rows: int
    padded: bool = False
    permuted: bool = False
    group_size: int | None = None
    per_block: int | None = None
    sums: int = 0

    @property
    def width(self) -> int:
        """Inputs of the operand."""
        blocks = self.padded or self.activation != "a16"
        return padded_inputs(self.inputs) if blocks else self.inputs

    @property
    def per_program(self) -> int:
        """Inputs of a row that one program can store: all, where one scale serves the row."""
        whole_row = self.activation != "a16" and self.group_size is None
        return pl.next_power_of_2(self.width) if whole_row else PER_PROGRAM

    @property
    def groups(self) -> int:
        """Scales of a block; without groups that of the row."""
        return BLOCK // self.group_size if self.group_size else 1

    @property
    def found_per_block(self) -> int:
        """Rows of scales and sums for each block; without groups for all of them."""
        return self.per_block or self.groups * (1 + (self.sums != 0))

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The operand's shapes: bf16[rows, width]; or the integers, int8[rows, width], and for each
        block the scales of its groups and then their sums, f32[blocks · per_block, rows]; without
        groups, one scale and one sum, f32[1 or 2, rows]."""
        shape = self.rows, self.width
        if self.activation == "a16":
            return [jax.ShapeDtypeStruct(shape, jnp.bfloat16)]
        blocks = self.width // BLOCK if self.group_size else 1
        found = blocks * self.found_per_block, self.rows
        return [jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(found, jnp.float32)]

    def store(
        self, row: jax.Array, first: jax.Array | int, values: jax.Array, operand: Sequence[jax.Ref],
        interpreted: bool,
    ) -> None:  # fmt: skip
        """Stores a part of a row, inside a kernel.

        first: its first input; values: f32[a power of two], zeros behind K; operand: references of
        `shapes`.
        """
        inputs = first + jnp.arange(values.shape[0])
        if self.activation != "a16":
            self._store_integers(row, first, values, operand, interpreted)
            return
        places = words.permuted_place(inputs) if self.permuted else inputs
        [x] = operand
        pltriton.store(x.at[row, places], values.astype(x.dtype), mask=inputs < self.width)

    def _store_integers(
        self, row: jax.Array, first: jax.Array | int, values: jax.Array, operand: Sequence[jax.Ref],
        interpreted: bool,
    ) -> None:  # fmt: skip
        (q, found), size = operand, values.shape[0]
        group_size = self.group_size or size
        parts = values.reshape(size // group_size, group_size)
        scales = jnp.max(jnp.abs(parts), axis=1) * np.float32(1 / LEVELS[self.activation])
        scales = jnp.where(scales < np.finfo(np.float32).tiny, 0, scales)
        inverse = _reciprocal(jnp.where(scales == 0, 1, scales), interpreted)
        inverse = jnp.where(scales == 0, 0, inverse)
        inverse = jnp.broadcast_to(inverse[:, None], parts.shape)
        integers = _rounded_product(parts, inverse, interpreted)
        flat, inputs = integers.reshape(size).astype(jnp.int8), first + jnp.arange(size)
        pltriton.store(q.at[row, inputs], flat, mask=inputs < self.width)
        group = first // group_size + jnp.arange(size // group_size)
        place = group // self.groups * self.found_per_block + group % self.groups
        there = group * group_size < self.width
        pltriton.store(found.at[place, row], scales, mask=there)
        if self.sums:
            total = jnp.sum(integers, axis=1) * self.sums  # exact: below 2^24
            pltriton.store(found.at[place + self.groups, row], total, mask=there)


def read(x: jax.Array, reading: Reading, *, interpret: bool = False) -> Operand:
    """Brings x into the form of a reading.

    Integers are those of `activations.quantize_activations`.

    Args:
      x: bf16 or f32[M, K].
      reading: of K inputs and at least M rows.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      Arrays of `reading.shapes`.
    """
    m, k = x.shape
    if reading.activation == "a16":
        padding = (0, reading.rows - m), (0, reading.width - k)
        values = jnp.pad(x, padding).astype(jnp.bfloat16)
        return (words.permute_inputs(values) if reading.permuted else values,)
    width, shapes, size = reading.width, reading.shapes(), reading.per_program
    arrays: list[jax.Array] = pl.pallas_call(
        partial(_kernel, reading=reading, m=m, size=size, interpreted=interpret),
        grid=(reading.rows, pl.cdiv(width, size)),
        in_specs=[whole(x)],
        out_specs=[whole(each) for each in shapes],
        out_shape=shapes,
        compiler_params=pltriton.CompilerParams(num_warps=warps(size), num_stages=1),
        interpret=interpret,
    )(x)
    return tuple(arrays)


def _kernel(
    x: jax.Ref, *operand: jax.Ref, reading: Reading, m: int, size: int, interpreted: bool
) -> None:
    """A program serves one row, and of it `size` inputs. x: [M, K]."""
    row, first = pl.program_id(0), pl.program_id(1) * size
    inputs = first + jnp.arange(size)
    real = (inputs < x.shape[1]) & (row < m)
    values = pltriton.load(x.at[row, inputs], mask=real, other=0).astype(jnp.float32)
    reading.store(row, first, values, operand, interpreted)


def warps(size: int, per_thread: int = 8, most: int = 16) -> int:
    """Warps of a program for `size` inputs. One load of bfloat16 brings eight to a thread."""
    return min(size // (32 * per_thread), most) or 1


def _reciprocal(values: jax.Array, interpreted: bool) -> jax.Array:
    return 1 / values if interpreted else _assembly("rcp.rn.f32 $0, $1;", values)


def _rounded_product(x: jax.Array, y: jax.Array, interpreted: bool) -> jax.Array:
    """x · y in float32, then rounded to an integer, ties to even."""
    if interpreted:
        return jnp.round(x * y)
    product = "{.reg .f32 product; mul.rn.f32 product, $1, $2; cvt.rni.f32.f32 $0, product;}"
    return _assembly(product, x, y)


def _assembly(code: str, *operands: jax.Array) -> jax.Array:
    """An operation on float32 that the compiler neither approximates nor fuses, so that a half is
    rounded as `quantize_activations` does."""
    [result] = pltriton.elementwise_inline_asm(
        code,
        args=operands,
        constraints=",".join(["=f"] + ["f"] * len(operands)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)],
    )
    return result
