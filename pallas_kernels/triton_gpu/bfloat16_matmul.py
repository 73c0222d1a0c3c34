"""The product of bfloat16 x and a bfloat16 matrix, in 16 bits or in 12, for NVIDIA GPUs from Ampere
on.

XLA's own product cannot serve here: it sums in another order for another number of rows.

The inputs are split into segments of whole steps, by the shape of the weight alone. The kernel
computes the sum of each segment from its first step to its last, and the segments are added from
left to right. With few rows, a program computes one segment, so that even a small matrix occupies
all multiprocessors; XLA then adds them. With many rows a program computes all of them. The
additions are the same, and so are a row's bits. This relies on tensor cores treating the columns of
a product alike, for every width of x: `benchmarks/gpu_check.py` checks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.operands import by_kind
from pallas_kernels.stacks import Stacked, form, in_stack
from pallas_kernels.triton_gpu.bfloat16_values import (
    COLUMN_TILE,
    STEP,
    Exact,
    Tile,
    rows_in_tile,
    stored,
)

ROW_TILES = (16, 32, 64)  # rows of x per program; the smallest that fits is taken
SHORTEST = 4  # steps of a segment; shorter sums would take longer to write than to compute
PROGRAMS = 264  # wanted: two for each multiprocessor of a large GPU
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def products(
    x: jax.Array, weights: Sequence[Exact | Stacked], *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Computes x · weightᵀ for every weight. Weights of one format and equal segments share a
    kernel.

    Args:
      x: bf16[M, K].
      weights: (N, K), alone or in a stack; those of 16 bits row by row.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      f32[M, N] for every weight, with the bits that it has alone.

    Raises:
      ValueError: a shape or dtype is another one, or a weight's rows are interleaved.
    """
    kinds = []
    for weight in weights:
        (n, k), held = weight.shape, cast(Exact, form(weight))
        narrow = isinstance(held, Bfloat12Weight)
        interleaved = not narrow and held.out_features is not None
        if interleaved or x.dtype != jnp.bfloat16 or x.shape[1:] != (k,):
            raise ValueError(
                "triton_gpu multiplies bfloat16 x by bfloat16 matrices stored row by row, "
                f"got {x.dtype.name}{list(x.shape)} and a matrix of {(n, k)}"
            )
        kinds.append((narrow, steps_per_segment(-(-n // COLUMN_TILE), -(-k // STEP))))

    def multiply(places: list[int]) -> list[jax.Array]:
        alike = [in_stack(weights[place]) for place in places]
        return _alike(x, alike, kinds[places[0]][1], interpret)

    return by_kind(kinds, multiply)


def _alike(
    x: jax.Array, ones: Sequence[Stacked], per_segment: int, interpret: bool
) -> list[jax.Array]:
    """Multiplies x by weights of one format and equal segments, in one kernel."""
    (m, k), outputs = x.shape, [one.shape[0] for one in ones]
    tile = next((tile for tile in ROW_TILES if tile >= m), ROW_TILES[-1])
    rows, steps = -(-m // tile), -(-k // STEP)
    ends = list(itertools.accumulate(-(-n // COLUMN_TILE) for n in outputs))
    firsts, columns = [0, *ends[:-1]], ends[-1]
    segments = -(-steps // per_segment)
    parts = segments if rows * columns < PROGRAMS else 1
    x = jnp.pad(x, ((0, rows * tile - m), (0, steps * STEP - k)))
    stacks = [stored(cast(Exact, one.stack)) for one in ones]

    def spec(number: int, name: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        first, last = firsts[number], ends[number] - 1
        layers, _, *rest = shape
        return pl.BlockSpec(
            (layers, rows_in_tile(name), *rest),
            lambda i, j, s: (0, jnp.clip(j, first, last) - first, *(0 for _ in rest)),
        )

    sums: jax.Array = pl.pallas_call(
        partial(
            _kernel, outputs=outputs, firsts=firsts, ends=ends, k=k, per_segment=per_segment,
            segments=segments // parts,
        ),
        grid=(rows, columns, parts),
        in_specs=[
            pl.BlockSpec((tile, x.shape[1]), lambda i, j, s: (i, 0)),
            [pl.BlockSpec((None,), lambda i, j, s: (0,)) for _ in ones],
            [
                {name: spec(number, name, array.shape) for name, array in arrays.items()}
                for number, arrays in enumerate(stacks)
            ],
        ],
        out_specs=pl.BlockSpec((None, tile, COLUMN_TILE), lambda i, j, s: (s, i, j)),
        out_shape=jax.ShapeDtypeStruct((parts, rows * tile, columns * COLUMN_TILE), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
    )(x, [one.index[None] for one in ones], stacks)  # fmt: skip
    total = reduce(jnp.add, [sums[part] for part in range(parts)])
    starts = [first * COLUMN_TILE for first in firsts]
    return [total[:m, start : start + n] for start, n in zip(starts, outputs, strict=True)]


def steps_per_segment(columns: int, steps: int) -> int:
    """Steps per segment, by the shape of the weight: tiles of outputs, steps over all inputs."""
    segments = max(1, min(-(-PROGRAMS // columns), steps // SHORTEST))
    return -(-steps // segments)


def _kernel(
    x: jax.Ref, indices: Sequence[jax.Ref], weights: Sequence[dict[str, jax.Ref]], y: jax.Ref, *,
    outputs: Sequence[int], firsts: Sequence[int], ends: Sequence[int], k: int,
    per_segment: int, segments: int,
) -> None:  # fmt: skip
    """Adds `segments` segments of a tile of outputs, of the weight that has it.

    x: bf16[M, padded K]; indices: int32[], and weights: `stored` arrays of which they are read, for
    every weight; y: f32[M, N].
    """
    column, part = pl.program_id(1), pl.program_id(2)
    for number, (n, first, end) in enumerate(zip(outputs, firsts, ends, strict=True)):

        def own(number: int = number, n: int = n, first: int = first) -> None:
            rest = n - (column - first) * COLUMN_TILE if n % COLUMN_TILE else None
            tile = Tile(weights[number], indices[number][...], rest, k)
            y[...] = _sum_of(x, tile, per_segment, part * segments, segments)

        if len(outputs) == 1:
            own()
        else:
            pl.when((column >= first) & (column < end))(own)


def _sum_of(x: jax.Ref, tile: Tile, per_segment: int, first: jax.Array, segments: int) -> jax.Array:
    """The sum of some segments from the first on, f32[M, N].

    The sum is computed as [N, M], because Hopper takes the weight, its left operand, from
    registers.
    """
    steps = x.shape[1] // STEP

    def add_step(step: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        total, place = carry
        values, place = tile.read(step, place)
        product = lax.dot_general(
            values, x[:, pl.ds(step * STEP, STEP)], _CONTRACT_LAST,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return total + product, place

    def segment(number: jax.Array) -> jax.Array:
        begin = number * per_segment
        zeros = jnp.zeros((COLUMN_TILE, x.shape[0]), jnp.float32)
        end = jnp.minimum(begin + per_segment, steps)
        sums: jax.Array = lax.fori_loop(begin, end, add_step, (zeros, tile.start(begin)))[0]
        return sums

    total = segment(first)
    if segments > 1:
        total = lax.fori_loop(1, segments, lambda i, total: total + segment(first + i), total)
    return total.T
