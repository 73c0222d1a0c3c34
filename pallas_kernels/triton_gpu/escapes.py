"""The escapes of a matrix in 12 bits a weight, inside a kernel.

The lists of escapes are in the order of the inputs, as a program reads them. Its places in the
lists are scalars, because threads exchange nothing then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import BLOCK_INPUTS, NO_ESCAPE
from pallas_kernels.triton_gpu.segments import COLUMN_TILE, both, inside

TILES = COLUMN_TILE // TILE
_WORDS = BLOCK_INPUTS // 4  # of a block's high bytes

# The place in the list of every tile: the number of its next escape, and that escape.
Places = list[tuple[jax.Array, jax.Array]]
State = tuple[list[jax.Array], Places]  # the high bytes of a step, and where its next escapes are


class Escapes:
    """The lists of escapes of a program's tiles, from one step on."""

    def __init__(
        self, lists: Any, index: jax.Array, outputs: jax.Array | None, width: int, begin: jax.Array
    ) -> None:
        """Loads the lists. The first step waits for them, while its weights are on their way too.

        Args:
          lists: a reference to uint32[L, TILES, E].
          index: int32[], the matrix of the stack.
          outputs: int32[], those of the tiles that the matrix has; None for all.
          width: inputs of a step.
          begin: int32[], the first step.
        """
        self.lists, self.index, self.outputs = lists, index, outputs
        self.width, self.begin = width, begin
        numbers = jnp.arange(pl.next_power_of_2(lists.shape[2]))
        self.listed = [self._load(tile, numbers) for tile in range(TILES)]

    def start(self) -> Places:
        """What `places` takes for the first step, and replaces."""
        return [(jnp.int32(0), jnp.int32(0))] * TILES

    def places(self, step: jax.Array, before: Places) -> Places:
        """The places of a step, from `start` or from the step before."""
        places: Places = lax.cond(step == self.begin, self._first, lambda: before)
        return places

    def put(
        self, step: jax.Array, blocks: Sequence[jax.Array], high: list[jax.Array], places: Places
    ) -> tuple[list[jax.Array], Places]:
        """Puts a step's escapes among its high bytes.

        The loop is inside a condition, because Triton prefetches nothing for the steps of a loop
        that holds another.

        Args:
          step: inputs from width · step on.
          blocks: int32[1, blocks, 1] for each two words, the numbers of the blocks.
          high: uint32[TILES, blocks, TILE], two words of every block: the high bytes of its inputs
            0, 2, 1, 3, and of 4, 6, 5, 7.
          places: of the step.

        Returns:
          The high bytes, and the places of the next step.
        """

        def here(escape: jax.Array) -> jax.Array:
            return _input(escape) < (step + 1) * self.width

        def remain(state: State) -> jax.Array:
            return reduce(jnp.logical_or, [here(escape) for _, escape in state[1]])

        def put_next(state: State) -> State:
            high, places = state
            high = _replaced(high, blocks, [escape for _, escape in places])
            numbers = [number + here(escape).astype(jnp.int32) for number, escape in places]
            return high, self._at(numbers)

        def put_all(state: State) -> State:
            after: State = lax.while_loop(remain, put_next, state)
            return after

        state = high, places
        after: State = lax.cond(remain(state), put_all, lambda state: state, state)
        return after

    def _first(self) -> Places:
        """The places of the first step: as many escapes precede them as have smaller inputs.

        The counts of several tiles are summed as fields of one word.
        """
        bits, first = self.lists.shape[2].bit_length(), self.begin * self.width
        together, counts = 32 // bits, []
        for tile in range(0, TILES, together):
            own = self.listed[tile : tile + together]
            fields = [
                (_input(each) < first).astype(jnp.int32) << bits * i for i, each in enumerate(own)
            ]
            total = jnp.sum(reduce(jnp.add, fields))
            counts += [_shifted(total, bits * i) & (2**bits - 1) for i in range(len(own))]
        return self._at(counts)

    def _at(self, numbers: Sequence[jax.Array]) -> Places:
        return [(number, self._load(tile, number)) for tile, number in enumerate(numbers)]

    def _load(self, tile: int, numbers: jax.Array) -> jax.Array:
        """Loads escapes of a tile by number, int32[...]; one past the end belongs to no input."""
        listed = both(numbers < self.lists.shape[2], inside(jnp.int32(tile * TILE), self.outputs))
        at = self.lists.at[self.index, jnp.int32(tile), numbers]
        entries = pltriton.load(at, mask=listed, other=jnp.uint32(NO_ESCAPE))
        return lax.bitcast_convert_type(entries, jnp.int32)


def _replaced(
    high: list[jax.Array], blocks: Sequence[jax.Array], escapes: Sequence[jax.Array]
) -> list[jax.Array]:
    """Replaces high bytes by one escape of every tile. Escapes of other steps replace none."""
    tiles, lanes = jnp.arange(TILES)[:, None, None], jnp.arange(TILE)[None, None, :]
    own = jnp.full((TILES, 1, 1), escapes[0])
    for tile, escape in enumerate(escapes[1:], 1):
        own = jnp.where(tiles == tile, escape, own)
    at = _input(own)
    shift = (at & 1) << 4 | (at & 2) << 2  # of its byte in a word
    byte = ((own & 255) << shift).astype(jnp.uint32)
    mask = (255 << shift).astype(jnp.uint32)
    replaced = []
    for i, word in enumerate(high):
        there = at >> 2 == _WORDS * blocks[i // _WORDS] + i % _WORDS
        there &= own >> 8 & TILE - 1 == lanes
        replaced.append(word ^ ((word ^ byte) & jnp.where(there, mask, 0)))
    return replaced


def _input(escape: jax.Array) -> jax.Array:
    """The input that an escape belongs to: its upper 20 bits."""
    return _shifted(escape, 12)


def _shifted(number: jax.Array, bits: int) -> jax.Array:
    """Shifts int32 numbers to the right like unsigned ones."""
    return lax.shift_right_logical(number, jnp.int32(bits))
