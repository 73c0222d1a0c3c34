"""Reads bfloat16 matrices inside a kernel, a tile of outputs and a step of inputs at a time.

A matrix in 12 bits a weight (`pallas_kernels.bfloat12`) is rebuilt in registers: a product of its
values has the bits of the plain matrix's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import (
    BLOCK_INPUTS,
    NO_ESCAPE,
    PALETTE,
    PALETTE_INPUTS,
    Bfloat12Weight,
)
from pallas_kernels.formats import Bfloat16Weight
from pallas_kernels.triton_gpu.segments import COLUMN_TILE, Refs, both, inside, load
from pallas_kernels.triton_gpu.word import Word, as_words, halves, interleaved
from pallas_kernels.words import ArrayWord

STEP = 128  # inputs that are read at once
_TILES, _BLOCKS = COLUMN_TILE // TILE, STEP // BLOCK_INPUTS
_WORDS = 3  # of an output's block

_CONTRACT_LAST = (((1,), (1,)), ((), ()))

Exact = Bfloat16Weight | Bfloat12Weight
Place = list[tuple[jax.Array, jax.Array]]  # the next escape of every tile: its number, and itself


def stored(stack: Exact) -> dict[str, jax.Array]:
    """The arrays of a stack of matrices, by name. Bytes that are read together are one word."""
    if isinstance(stack, Bfloat12Weight):
        packed, palettes = (as_words(each) for each in (stack.packed, stack.palettes))
        return {"packed": packed, "palettes": palettes, "escapes": stack.escapes}
    return {"values": lax.bitcast_convert_type(stack.bits, jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class ExactTile:
    """A tile of outputs of one matrix (`segments.Tile`).

    refs: `stored`, of which only the tile's outputs.
    index: int32[], the matrix of the stack.
    outputs: int32[], those of the tile that the matrix has; None for all.
    inputs: K of the matrix.
    interpreted: whether the kernel runs as ordinary XLA operations.
    """

    refs: Refs
    index: jax.Array
    outputs: jax.Array | None
    inputs: int
    interpreted: bool

    def sum_steps(
        self, x: Refs, rows: jax.Array | None, begin: jax.Array, end: jax.Array
    ) -> jax.Array:
        """Implements `segments.Tile`. x: "x", bf16[M, K]."""
        of_x = x["x"]
        tokens = inside(jnp.arange(of_x.shape[0])[:, None], rows)

        def add_step(step: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            total, place = carry
            values, place = self.read(step, place)
            inputs = pl.ds(step * STEP, STEP)
            right = load(of_x.at[:, inputs], both(tokens, self._real(step, jnp.arange(STEP)[None])))
            product = lax.dot_general(
                values, right, _CONTRACT_LAST, preferred_element_type=jnp.float32
            )
            return total + product, place

        zeros = jnp.zeros((COLUMN_TILE, of_x.shape[0]), jnp.float32)
        total: jax.Array = lax.fori_loop(begin, end, add_step, (zeros, self.start(begin)))[0]
        return total

    def start(self, step: jax.Array) -> Any:
        """Returns the place from which `read` reads a step."""
        if "values" in self.refs:
            return ()
        count = self.refs["escapes"].shape[2]
        numbers = []
        for tile in range(_TILES):
            inputs = _input(self._escape(jnp.int32(tile), jnp.arange(pl.next_power_of_2(count))))
            numbers.append(jnp.sum((inputs < step * STEP).astype(jnp.int32)))
        return [(each, self._escape(jnp.int32(tile), each)) for tile, each in enumerate(numbers)]

    def read(self, step: jax.Array, place: Any) -> tuple[jax.Array, Any]:
        """Returns bf16[COLUMN_TILE, STEP], zeros where the matrix ends, and the next step's place.

        step: inputs from STEP · step on.
        place: from `start`, or from the step before.
        """
        if "values" not in self.refs:
            return self._rebuilt(step, place)
        has = inside(jnp.arange(COLUMN_TILE)[:, None], self.outputs)
        mask = both(has, self._real(step, jnp.arange(STEP)[None]))
        at = self.refs["values"].at[self.index, :, pl.ds(step * STEP, STEP)]
        return load(at, mask), place

    def _real(self, step: jax.Array, inputs: jax.Array) -> jax.Array | None:
        """Which inputs of a step the matrix has; None for all."""
        return inside(step * STEP + inputs, self.inputs if self.inputs % STEP else None)

    def _rebuilt(self, step: jax.Array, place: Place) -> tuple[jax.Array, Place]:
        """Rebuilds a step's values from the words of its blocks, and puts its escapes in."""
        tiles, lanes = jnp.arange(_TILES)[:, None, None], jnp.arange(TILE)[None, None, :]
        blocks = jnp.arange(_BLOCKS)[None, :, None]
        has = inside(TILE * tiles, self.outputs)
        mask = both(has, self._real(step, BLOCK_INPUTS * blocks))
        rows = _WORDS * (step * _BLOCKS + blocks)
        words = [
            load(self.refs["packed"].at[self.index, tiles, rows + number, lanes], mask)
            for number in range(_WORDS)
        ]
        palette = step // (PALETTE_INPUTS // STEP)
        entries = [
            load(self.refs["palettes"].at[self.index, tiles, palette, number], has)
            for number in range(PALETTE // 4)
        ]
        word = ArrayWord if self.interpreted else Word
        values = interleaved(_rebuilt([word(each) for each in words], [word(p) for p in entries]))
        bits = jnp.transpose(values, (0, 2, 1, 3)).reshape(COLUMN_TILE, STEP)
        bits, place = self._with_escapes(step, bits, place)
        return lax.bitcast_convert_type(bits, jnp.bfloat16), place

    def _with_escapes(
        self, step: jax.Array, bits: jax.Array, place: Place
    ) -> tuple[jax.Array, Place]:
        """Puts a step's escapes among its values: uint16[COLUMN_TILE, STEP].

        The loop is inside a condition, because Triton prefetches nothing for the steps of a loop
        that holds another. The state is of scalars, because threads exchange nothing then.
        """
        outputs, inputs = jnp.arange(COLUMN_TILE)[:, None], jnp.arange(STEP)[None, :]

        def here(entry: jax.Array) -> jax.Array:
            return _input(entry) < (step + 1) * STEP

        def remain(state: tuple[jax.Array, Place]) -> jax.Array:
            return reduce(jnp.logical_or, [here(entry) for _, entry in state[1]])

        def put(state: tuple[jax.Array, Place]) -> tuple[jax.Array, Place]:
            bits, place = state
            tile, (number, entry) = jnp.int32(_TILES - 1), place[-1]
            for i in reversed(range(_TILES - 1)):
                earlier = here(place[i][1])
                tile = jnp.where(earlier, i, tile)
                number, entry = (
                    jnp.where(earlier, new, old)
                    for new, old in zip(place[i], (number, entry), strict=True)
                )
            own = outputs == tile * TILE + (entry >> 8 & 15)
            own &= inputs == _input(entry) - step * STEP
            escaped = bits & 255 | (jnp.full(bits.shape, entry & 255) << 8).astype(jnp.uint16)
            number, entry = number + 1, self._escape(tile, number + 1)
            place = [
                (jnp.where(tile == i, number, old), jnp.where(tile == i, entry, following))
                for i, (old, following) in enumerate(place)
            ]
            return jnp.where(own, escaped, bits), place

        state = bits, place
        after: tuple[jax.Array, Place] = lax.cond(
            remain(state), lambda state: lax.while_loop(remain, put, state), lambda state: state,
            state,
        )  # fmt: skip
        return after

    def _escape(self, tile: jax.Array, numbers: jax.Array) -> jax.Array:
        """Loads escapes of a tile by number, int32[...]; one past the end belongs to no input."""
        escapes = self.refs["escapes"]
        listed = both(numbers < escapes.shape[2], inside(tile * TILE, self.outputs))
        at = escapes.at[self.index, tile, numbers]
        entries = pltriton.load(at, mask=listed, other=jnp.uint32(NO_ESCAPE))
        return lax.bitcast_convert_type(entries, jnp.int32)


def _rebuilt(words: Sequence[ArrayWord], palette: Sequence[ArrayWord]) -> list[jax.Array]:
    """Rebuilds the eight values of blocks, uint16[...] each, from their three words.

    palette: four words.
    """
    first, second, codes = words
    numbers, signs, select_bytes = codes & 0x77777777, codes << 4, codes.select_bytes
    high_bytes: list[Any] = []
    for shift, upper in ((0, 0xD9C8), (16, 0xFBEA)):  # of inputs 0, 4, 2, 6, then 1, 5, 3, 7
        low = select_bytes(palette[0], palette[1], numbers >> shift)
        high = select_bytes(palette[2], palette[3], numbers >> shift)
        high_bytes.append(low ^ ((low ^ high) & select_bytes(signs, codes, upper)))
    values: list[jax.Array] = []
    for word, order in ((first, 0x6420), (second, 0x7531)):
        four = select_bytes(high_bytes[0], high_bytes[1], order)
        values += halves(select_bytes(word, four, 0x6240))
        values += halves(select_bytes(word, four, 0x7351))
    return values


def _input(escape: jax.Array) -> jax.Array:
    """The input that an escape belongs to: its upper 20 bits."""
    return lax.shift_right_logical(escape, jnp.int32(12))
