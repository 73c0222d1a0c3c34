"""The query rows of attention's programs, and where their results belong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import words
from pallas_kernels.triton_gpu.readings import Reading

ROW_TILE = 16  # query rows of a program: the narrowest product


@dataclasses.dataclass(frozen=True)
class Output:
    """Where the result of a tile of query rows belongs: a row for each token, a column for each
    feature of its heads.

    queries: their shape, (B, T, H, E).
    per_token: query rows of a key-value head for each token.
    reading: as in `attention`.
    """

    queries: tuple[int, ...]
    per_token: int
    reading: Reading | None

    def shape(self) -> jax.ShapeDtypeStruct:
        """f32[B · T, H · E] or what the reading says."""
        if self.reading is not None:
            return self.reading.shapes()[0]
        b, t, heads, e = self.queries
        return jax.ShapeDtypeStruct((b * t, heads * e), jnp.float32)

    def store(self, y: jax.Ref, parts: Sequence[jax.Array]) -> None:
        """Stores a tile's result: f32[ROW_TILE, width], for each plane of a head's features."""
        (_, tokens, _, e), width = self.queries, parts[0].shape[1]
        token, query = tile_rows((pl.program_id(1), pl.program_id(2)), self.per_token)
        row = (pl.program_id(0) * tokens + token)[:, None]
        for number, part in enumerate(parts):
            columns = query[:, None] * e + number * width + jnp.arange(width)[None, :]
            if self.reading is not None and self.reading.permuted:
                columns = words.permuted_place(columns)
            inside = jnp.broadcast_to((token < tokens)[:, None], part.shape)
            pltriton.store(y.at[row, columns], part.astype(y.dtype), mask=inside)


def tile_rows(tile: tuple[jax.Array, jax.Array], per_token: int) -> tuple[jax.Array, jax.Array]:
    """The tokens and the heads of a tile's query rows, int32[ROW_TILE] each.

    tile: the key-value head's and the tile's number.
    """
    head, number = tile
    row = number * ROW_TILE + jnp.arange(ROW_TILE)
    return row // per_token, head * per_token + row % per_token
