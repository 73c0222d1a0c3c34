"""Reads bfloat16 matrices inside a kernel, a tile of outputs and a step of inputs at a time.

A matrix in 12 bits a weight (`pallas_kernels.bfloat12`) is rebuilt in registers: a product of its
values has the bits of the plain matrix's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import BLOCK_INPUTS, NO_ESCAPE, PALETTE_INPUTS, Bfloat12Weight
from pallas_kernels.formats import Bfloat16Weight

STEP = 128  # inputs that are read at once
COLUMN_TILE = 64  # outputs: the weight is the left operand, of 64 rows on Hopper
_TILES, _BLOCKS = COLUMN_TILE // TILE, STEP // BLOCK_INPUTS

Exact = Bfloat16Weight | Bfloat12Weight
State = tuple[jax.Array, jax.Array, jax.Array]


def stored(stack: Exact) -> dict[str, jax.Array]:
    """The arrays of a stack of matrices, by name."""
    if isinstance(stack, Bfloat12Weight):
        return {"packed": stack.packed, "palettes": stack.palettes, "escapes": stack.escapes}
    return {"values": lax.bitcast_convert_type(stack.bits, jnp.bfloat16)}


def rows_in_tile(name: str) -> int:
    """The rows of one of the `stored` arrays, [L, rows, …], that a tile of outputs is in."""
    return COLUMN_TILE if name == "values" else _TILES


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of outputs of one matrix.

    refs: `stored`, of which only the tile's outputs.
    index: int32[], the matrix of the stack.
    outputs: int32[], those of the tile that the matrix has; None for all.
    inputs: K of the matrix.
    """

    refs: Mapping[str, Any]
    index: jax.Array
    outputs: jax.Array | None
    inputs: int

    def start(self, step: jax.Array) -> Any:
        """Returns the place from which `read` reads a step."""
        if "values" in self.refs:
            return ()
        count = self.refs["escapes"].shape[2]
        entries = self._escapes(jnp.arange(pl.next_power_of_2(count))[None, :])
        return jnp.sum((_input(entries) < step * STEP).astype(jnp.int32), axis=1)

    def read(self, step: jax.Array, place: Any) -> tuple[jax.Array, Any]:
        """Returns bf16[COLUMN_TILE, STEP], zeros where the matrix ends, and the next step's place.

        step: inputs from STEP · step on.
        place: from `start`, or from the step before.
        """
        if "values" not in self.refs:
            return self._rebuilt(step, place)
        outputs, inputs = jnp.arange(COLUMN_TILE)[:, None], jnp.arange(STEP)[None, :]
        mask = self.has(outputs, step * STEP + inputs)
        at = self.refs["values"].at[self.index, :, pl.ds(step * STEP, STEP)]
        return pltriton.load(at, mask=mask, other=None if mask is None else 0.0), place

    def has(self, outputs: jax.Array, inputs: jax.Array) -> jax.Array | None:
        """Whether the matrix has these outputs of the tile and these inputs; None for all."""
        inside = None if self.outputs is None else outputs < self.outputs
        if self.inputs % STEP == 0:
            return inside
        real = inputs < self.inputs
        return real if inside is None else inside & real

    def _rebuilt(self, step: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rebuilds a step's values in the order in which they are stored: [tiles, blocks, outputs
        of a tile, a, b, words of low bytes], where byte 2a + b of a word belongs to input 2b + a.
        """
        tiles, lanes = _along(0, _TILES), _along(2, TILE)
        inputs = step * STEP + sum(
            size * _along(axis, count)
            for axis, count, size in ((1, _BLOCKS, BLOCK_INPUTS), (3, 2, 1), (4, 2, 2), (5, 2, 4))
        )
        mask = self.has(TILE * tiles + lanes, inputs)
        first, second, pair = (self._word(step, number) for number in range(3))
        codes = _joined(pair & 15, pair >> 4).astype(jnp.int32)
        palette = step // (PALETTE_INPUTS // STEP)
        high = _load(self.refs["palettes"].at[self.index, tiles, palette, codes], mask)
        high, place = self._with_escapes(step, place, high.astype(jnp.int32), inputs)
        bits = high << 8 | _joined(first, second).astype(jnp.int32)
        if mask is not None:
            bits = jnp.where(mask, bits, 0)
        bits = jnp.transpose(bits.astype(jnp.uint16), (0, 2, 1, 5, 4, 3))
        return lax.bitcast_convert_type(bits.reshape(COLUMN_TILE, STEP), jnp.bfloat16), place

    def _word(self, step: jax.Array, number: int) -> jax.Array:
        """One of the three words of every block: uint8[tiles, blocks, outputs of a tile, 2, 2]."""
        tiles, bytes_ = jnp.arange(_TILES)[:, None, None], jnp.arange(4 * TILE)[None, None, :]
        blocks = step * _BLOCKS + jnp.arange(_BLOCKS)[None, :, None]
        mask = self.has(TILE * tiles, BLOCK_INPUTS * blocks)
        rows = 3 * blocks + number
        words = _load(self.refs["packed"].at[self.index, tiles, rows, bytes_], mask)
        return words.reshape(_TILES, _BLOCKS, TILE, 2, 2)

    def _with_escapes(
        self, step: jax.Array, place: jax.Array, high: jax.Array, inputs: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Puts a step's escapes among the high bytes: int32, as in `_rebuilt`.

        place: int32[tiles], the number of the first escape that is not before the step.
        """
        end = (step + 1) * STEP
        lanes = _along(2, TILE)

        def put(state: State) -> State:
            high, place, entry = state
            each = entry[:, None, None, None, None, None]
            own = (_input(each) == inputs) & (each >> 8 & 15 == lanes)
            place += (_input(entry) < end).astype(jnp.int32)
            high = jnp.where(own, each & 255, high)
            return high, place, self._escapes(place[:, None])[:, 0]

        entry = self._escapes(place[:, None])[:, 0]
        high, place, _ = lax.while_loop(
            lambda state: jnp.min(_input(state[2])) < end, put, (high, place, entry)
        )
        return high, place

    def _escapes(self, numbers: jax.Array) -> jax.Array:
        """Loads escapes of every tile by number: int[tiles or 1, …] -> int32[tiles, …].

        One past the end of a list belongs to no input.
        """
        escapes, tiles = self.refs["escapes"], jnp.arange(_TILES)[:, None]
        inside = numbers < escapes.shape[2]
        if self.outputs is not None:
            inside &= TILE * tiles < self.outputs
        inside = jnp.broadcast_to(inside, (_TILES, numbers.shape[1]))
        at = escapes.at[self.index, tiles, numbers]
        entries = pltriton.load(at, mask=inside, other=jnp.uint32(NO_ESCAPE))
        return lax.bitcast_convert_type(entries, jnp.int32)


def _along(axis: int, count: int) -> jax.Array:
    """0 … count - 1 along one of the six axes of `_rebuilt`."""
    return jnp.arange(count).reshape(*(count if each == axis else 1 for each in range(6)))


def _input(escape: jax.Array) -> jax.Array:
    """The input that an escape belongs to: its upper 20 bits."""
    return lax.shift_right_logical(escape, jnp.int32(12))


def _joined(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate((first[..., None], second[..., None]), axis=-1)


def _load(at: Any, mask: jax.Array | None) -> jax.Array:
    """Loads bytes, zeros outside a mask that broadcasts to them."""
    other = None if mask is None else jnp.uint8(0)
    values: jax.Array = pltriton.load(at, mask=mask, other=other)
    return values
