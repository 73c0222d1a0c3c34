"""Reads bfloat16 matrices inside a kernel, a tile of outputs and a step of inputs at a time.

A matrix in 12 bits a weight (`pallas_kernels.bfloat12`) is rebuilt in registers: a product of its
values has the bits of the plain matrix's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import (
    BLOCK_INPUTS,
    PALETTE,
    PALETTE_INPUTS,
    Bfloat12Weight,
)
from pallas_kernels.formats import Bfloat16Weight
from pallas_kernels.triton_gpu.escapes import TILES, Escapes, Places
from pallas_kernels.triton_gpu.segments import COLUMN_TILE, Refs, both, inside, load
from pallas_kernels.triton_gpu.word import Word, as_words, halves, interleaved
from pallas_kernels.words import ArrayWord

STEP = 128  # inputs that are read at once
# Inputs of one product. Triton splits a longer one, and rebuilt values pass through memory twice.
PART = 64
PARTS, _BLOCKS = STEP // PART, PART // BLOCK_INPUTS
_WORDS = 3  # of an output's block

_CONTRACT_LAST = (((1,), (1,)), ((), ()))

Exact = Bfloat16Weight | Bfloat12Weight


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
        escapes = self._escapes(begin)

        def add_step(number: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            total, places = carry
            step = begin + number
            if escapes is None:
                values = [self._read(PARTS * step + i) for i in range(PARTS)]
            else:
                values, places = self._rebuilt(step, escapes, places)
            for i, part in enumerate(values):
                first = (PARTS * step + i) * PART
                real = self._real(first + jnp.arange(PART)[None])
                right = load(of_x.at[:, pl.ds(first, PART)], both(tokens, real))
                total += lax.dot_general(
                    part, right, _CONTRACT_LAST, preferred_element_type=jnp.float32
                )
            return total, places

        steps = jnp.maximum(end - begin, 1)  # no segment is empty, and the compiler may know it
        zeros = jnp.zeros((COLUMN_TILE, of_x.shape[0]), jnp.float32)
        places = () if escapes is None else escapes.start()
        total: jax.Array = lax.fori_loop(0, steps, add_step, (zeros, places))[0]
        return total

    def _escapes(self, begin: jax.Array) -> Escapes | None:
        """The escapes from a step on; None for a matrix of 16 bits."""
        if "values" in self.refs:
            return None
        return Escapes(self.refs["escapes"], self.index, self.outputs, STEP, begin)

    def _real(self, inputs: jax.Array) -> jax.Array | None:
        """Which inputs the matrix has; None for all."""
        return inside(inputs, self.inputs if self.inputs % STEP else None)

    def _read(self, part: jax.Array) -> jax.Array:
        """Returns bf16[COLUMN_TILE, PART], zeros where the matrix ends."""
        has = inside(jnp.arange(COLUMN_TILE)[:, None], self.outputs)
        mask = both(has, self._real(part * PART + jnp.arange(PART)[None]))
        return load(self.refs["values"].at[self.index, :, pl.ds(part * PART, PART)], mask)

    def _rebuilt(
        self, step: jax.Array, escapes: Escapes, places: Places
    ) -> tuple[list[jax.Array], Places]:
        """Rebuilds a step's parts from the words of their blocks: bf16[COLUMN_TILE, PART] each.

        Returns them, and the places of the next step's escapes.
        """
        places = escapes.places(step, places)
        tiles, lanes = jnp.arange(TILES)[:, None, None], jnp.arange(TILE)[None, None, :]
        has = inside(TILE * tiles, self.outputs)
        word = ArrayWord if self.interpreted else Word
        packed, palettes = self.refs["packed"], self.refs["palettes"]
        piece = step // (PALETTE_INPUTS // STEP)
        palette = [
            word(load(palettes.at[self.index, tiles, piece, i], has)) for i in range(PALETTE // 4)
        ]
        blocks = [
            (PARTS * step + part) * _BLOCKS + jnp.arange(_BLOCKS)[None, :, None]
            for part in range(PARTS)
        ]
        low: list[ArrayWord] = []
        high: list[jax.Array] = []
        for own in blocks:
            mask = both(has, self._real(BLOCK_INPUTS * own))
            first, second, codes = (
                word(load(packed.at[self.index, tiles, _WORDS * own + i, lanes], mask))
                for i in range(_WORDS)
            )
            low += [first, second]
            high += [each.value for each in _high_bytes(codes, palette)]
        high, places = escapes.put(step, blocks, high, places)
        four = [_joined(each, word(other)) for each, other in zip(low, high, strict=True)]
        return [_values(four[2 * part] + four[2 * part + 1]) for part in range(PARTS)], places


def _high_bytes(codes: ArrayWord, palette: Sequence[ArrayWord]) -> list[ArrayWord]:
    """Looks the codes of blocks up in a palette of four words.

    Returns the high bytes in the order of the low bytes: of inputs 0, 2, 1, 3, and of 4, 6, 5, 7.
    """
    numbers, signs, select_bytes = codes & 0x77777777, codes << 4, codes.select_bytes
    found: list[Any] = []
    for shift, upper in ((0, 0xD9C8), (16, 0xFBEA)):  # of inputs 0, 4, 2, 6, then 1, 5, 3, 7
        lower_half = select_bytes(palette[0], palette[1], numbers >> shift)
        upper_half = select_bytes(palette[2], palette[3], numbers >> shift)
        is_upper = select_bytes(signs, codes, upper)
        found.append(lower_half ^ ((lower_half ^ upper_half) & is_upper))
    return [select_bytes(found[0], found[1], order) for order in (0x6420, 0x7531)]


def _joined(low: ArrayWord, high: ArrayWord) -> list[jax.Array]:
    """Joins the bytes of inputs 0, 2, 1, 3: four arrays of uint16[...], of inputs 0 to 3."""
    pairs = [low.select_bytes(low, high, order) for order in (0x6240, 0x7351)]
    return [half for pair in pairs for half in halves(pair)]


def _values(values: Sequence[jax.Array]) -> jax.Array:
    """uint16[TILES, blocks, TILE] of every input of a block -> bf16[COLUMN_TILE, PART]."""
    bits = jnp.transpose(interleaved(values), (0, 2, 1, 3)).reshape(COLUMN_TILE, PART)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
