"""Multiplies a tile of a quantized matrix inside a kernel, group by group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import words
from pallas_kernels.formats import BLOCK, PLANE, Int4Weight, Int8Weight, Mxfp4Weight, Quantized
from pallas_kernels.nested import NestedInt8Weight
from pallas_kernels.operands import group_parts, product_dtype
from pallas_kernels.triton_gpu.segments import COLUMN_TILE, Refs, both, inside, load
from pallas_kernels.triton_gpu.word import Word, as_words, bytes_, halves, interleaved
from pallas_kernels.weights import Rounded

# By name and group: a block's scales, zeros and minima, [N, 1] each, and those of x, [1, M] each.
Columns = dict[str, list[jax.Array]]

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def stored(stack: Rounded) -> dict[str, jax.Array]:
    """The arrays of a stack of matrices, by name. Bytes that are read together are one word."""
    if isinstance(stack, Int8Weight):
        return {"integers": stack.integers, **group_parts(stack)}
    rest = {"rest": stack.rest} if isinstance(stack, NestedInt8Weight) else {}
    planes = {name: as_words(plane) for name, plane in {"packed": stack.packed, **rest}.items()}
    return planes | group_parts(stack)


@dataclasses.dataclass(frozen=True)
class QuantizedTile:
    """A tile of outputs of one matrix (`segments.Tile`).

    refs: `stored`, of which only the tile's outputs.
    index: int32[], the matrix of the stack.
    outputs: int32[], those of the tile that the matrix has; None for all.
    kind: the weight's format.
    group_size: its group size.
    interpreted: whether the kernel runs as ordinary XLA operations.
    """

    refs: Refs
    index: jax.Array
    outputs: jax.Array | None
    kind: type[Rounded]
    group_size: int | None
    interpreted: bool

    @property
    def width(self) -> int:
        """Inputs of one product."""
        return self.group_size or PLANE

    def sum_steps(
        self, x: Refs, rows: jax.Array | None, begin: jax.Array, end: jax.Array
    ) -> jax.Array:
        """Implements `segments.Tile`; a step is a block.

        x: "x", bf16 or int8[M, K]; of integers "x_scales", f32[groups, M]; for minima "x_sums",
        f32[groups, M].
        """
        of_x = x["x"]
        # Without groups the sum has the products' dtype, because one scale multiplies all of it.
        dtype = product_dtype(of_x.dtype) if self.group_size is None else jnp.float32

        def add_block(block: jax.Array, carry: tuple[jax.Array, Columns]) -> Any:
            total, columns = carry
            # Those of the next block are loaded during this one.
            upcoming = self._columns(x, rows, jnp.minimum(block + 1, end - 1))
            for place, values in self._products(block, of_x.dtype, columns):
                inputs = _inputs(of_x, block * BLOCK + place * self.width, self.width, rows)
                product = self._product(values, inputs, columns, place)
                if self.group_size is not None:
                    product = self._scaled(product, columns, place)
                total += product
            return total, upcoming

        start = jnp.zeros((COLUMN_TILE, of_x.shape[0]), dtype), self._columns(x, rows, begin)
        total, columns = lax.fori_loop(begin, end, add_block, start)
        if self.group_size is None:
            total = self._scaled(total, columns, 0)
        return cast(jax.Array, total)

    def _columns(self, x: Refs, rows: jax.Array | None, block: jax.Array) -> Columns:
        """Loads the scales, zeros and minima of a block's groups, and the scales and sums of x."""
        outputs, tokens = jnp.arange(COLUMN_TILE)[:, None], jnp.arange(x["x"].shape[0])[None, :]
        found: Columns = {}
        for name in ("scales", "zeros", "minima"):
            if name in self.refs:
                ref, mask = self.refs[name], inside(outputs, self.outputs)
                found[name] = [
                    load(ref.at[self.index, outputs, group], mask)
                    for group in self._groups(ref.shape[2], block)
                ]
        for name in ("x_scales", "x_sums"):
            if name in x:
                mask = inside(tokens, rows)
                found[name] = [
                    load(x[name].at[group, tokens], mask)
                    for group in self._groups(x[name].shape[0], block)
                ]
        return found

    def _groups(self, groups: int, block: jax.Array) -> list[jax.Array]:
        """The numbers of a block's groups, of all; zero alone where all inputs are one."""
        if groups == 1:
            return [jnp.int32(0)]
        count = BLOCK // self.width
        return [block * count + group for group in range(count)]

    def _products(
        self, block: jax.Array, dtype: jnp.dtype, columns: Columns
    ) -> Iterator[tuple[int, jax.Array]]:
        """Yields the values of a block that are multiplied together, [N, width] in `dtype`, in the
        order of the inputs, and their place: 0 for inputs 0 … width - 1."""
        if self.kind is Int8Weight:
            for place in range(BLOCK // self.width):
                inputs = pl.ds(block * BLOCK + place * self.width, self.width)
                yield place, self._load("integers", inputs).astype(dtype)
            return
        words_, per_plane = self.width // 4, PLANE // self.width
        first = block * (PLANE // 4)
        parts = [
            self._planes(pl.ds(first + part * words_, words_), dtype) for part in range(per_plane)
        ]
        for place in range(2 * per_plane):
            values = parts[place % per_plane][place // per_plane]
            yield place, self._centred(values, columns, place)

    def _planes(self, places: Any, dtype: jnp.dtype) -> list[jax.Array]:
        """The values of some words in the low and in the high plane: [N, width] each.

        Those of an `Int4Weight` are raised by 136 in bfloat16 and 16 times as large in int8.
        """
        word = self._word("packed", places)
        if self.kind is NestedInt8Weight:
            low, high = (_joined(bytes_(part)) for part in words.INT4_INT8.words(word))
            rest = words.INT4_INT8.words(self._word("rest", places))
            return [
                (plane + (_joined(bytes_(part)) >> 4)).astype(dtype)
                for plane, part in zip((low, high), rest, strict=True)
            ]
        if dtype == jnp.int8:
            decoder = words.INT4_INT8 if self.kind is Int4Weight else words.MXFP4_INT8
            return [_joined(bytes_(part)) for part in decoder.words(word)]
        if self.kind is Int4Weight:
            parts = [halves(part) for part in words.INT4_BF16.words(word)]
            values = [[even[0], odd[0], even[1], odd[1]] for even, odd in (parts[:2], parts[2:])]
        else:
            parts = [halves(part) for part in words.twice_e2m1(word)]
            values = [parts[0] + parts[1], parts[2] + parts[3]]
        return [lax.bitcast_convert_type(_joined(each), jnp.bfloat16) for each in values]

    def _centred(self, values: jax.Array, columns: Columns, place: int) -> jax.Array:
        """Subtracts what `_planes` added, and a weight's zero, from bfloat16 values: exactly."""
        if self.kind is not Int4Weight or values.dtype == jnp.int8:
            return values
        values -= 136
        if "zeros" not in columns:
            return values
        zero = columns["zeros"][place % len(columns["zeros"])]
        return values - zero.astype(jnp.float32).astype(jnp.bfloat16)

    def _product(
        self, values: jax.Array, inputs: jax.Array, columns: Columns, place: int
    ) -> jax.Array:
        """The product of some weights' integers and x: f32 or i32[N, M]."""
        product = lax.dot_general(
            values, inputs, _CONTRACT_LAST, precision=lax.Precision.DEFAULT,
            preferred_element_type=product_dtype(values.dtype),
        )  # fmt: skip
        if values.dtype != jnp.int8 or self.kind is not Int4Weight:
            return product
        product >>= 4
        if "zeros" in columns:
            zero = columns["zeros"][place % len(columns["zeros"])].astype(jnp.int32)
            product -= zero * jnp.sum(inputs.astype(jnp.int32), axis=1)[None, :]
        return product

    def _scaled(self, product: jax.Array, columns: Columns, place: int) -> jax.Array:
        """Scales a group's product and adds its minima: f32 or i32[N, M] -> f32[N, M]."""
        scale = columns["scales"][place]
        if self.kind is Mxfp4Weight:
            code = scale.astype(jnp.int32)
            bits = jnp.where(code == 255, 0x7FC00000, jnp.maximum(code << 23, 1 << 22))
            scale = lax.bitcast_convert_type(bits, jnp.float32) * 0.5  # see `formats.group_scales`
        scale = scale.astype(jnp.float32)
        if self.kind is NestedInt8Weight:
            scale /= 16
        of_x = columns["x_scales"][place] if "x_scales" in columns else None
        scaled: jax.Array = product.astype(jnp.float32) * (scale if of_x is None else scale * of_x)
        if "minima" not in columns:
            return scaled
        least = columns["minima"][place].astype(jnp.float32)
        of_zero = least - cast(type[Quantized], self.kind).smallest * scale  # the integer zero's
        scaled += of_zero * columns["x_sums"][place]
        return scaled

    def _word(self, name: str, places: Any) -> words.ArrayWord:
        kind = words.ArrayWord if self.interpreted else Word
        return kind(self._load(name, places))

    def _load(self, name: str, columns: Any) -> jax.Array:
        """Loads columns of one of the weight's arrays: [N, columns]."""
        mask = inside(jnp.arange(COLUMN_TILE)[:, None], self.outputs)
        return load(self.refs[name].at[self.index, :, columns], mask)


def _inputs(x: jax.Ref, first: jax.Array, width: int, rows: jax.Array | None) -> jax.Array:
    """Loads inputs of x, zeros where it has none: [M, width]."""
    real = inside(first + jnp.arange(width)[None, :], x.shape[1] if x.shape[1] % BLOCK else None)
    tokens = inside(jnp.arange(x.shape[0])[:, None], rows)
    return load(x.at[:, pl.ds(first, width)], both(tokens, real))


def _joined(values: Sequence[jax.Array]) -> jax.Array:
    """Joins four arrays [N, words], one for each byte of a word, to [N, 4 · words]."""
    joined = interleaved(values)
    return joined.reshape(joined.shape[0], -1)
