"""Applies functions to tiles of a fixed number of rows: on CPUs, results are batch-invariant.

XLA chooses an order of summation for each shape: XLA:CPU uses different algorithms for one row and
for two. Here every call on a CPU has ROW_TILE rows, whatever the number of rows. Elsewhere all
tiles are one batched call, whose order may depend on their number: one after another, they would
leave a GPU idle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

ROW_TILE = 8

Tiles = TypeVar("Tiles")  # an array or a tree of arrays


def map_row_tiles(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies `function` to tiles of exactly ROW_TILE rows: [M, ...] -> [M, ...].

    The rows are padded with zeros. On CPUs the tiles run one after another, so every call has the
    same shape. Elsewhere they run in parallel.
    """
    m = x.shape[0]
    tiles = -(-m // ROW_TILE)
    x = jnp.pad(x, ((0, tiles * ROW_TILE - m), *((0, 0) for _ in x.shape[1:])))
    x = x.reshape(tiles, ROW_TILE, *x.shape[1:])
    y = over_tiles(function, x)
    return y.reshape(tiles * ROW_TILE, *y.shape[2:])[:m]


def over_tiles(function: Callable[[Tiles], jax.Array], tiles: Tiles) -> jax.Array:
    """Maps `function` over the leading axis: a loop on CPUs, one batched call elsewhere."""
    y: jax.Array = lax.platform_dependent(
        tiles, cpu=lambda xs: lax.map(function, xs), default=jax.vmap(function)
    )
    return y
