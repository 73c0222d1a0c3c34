"""How products are spread over a GPU: tiles of outputs and segments of inputs, in one launch.

The inputs are split into segments of whole steps, by the shape of the weight alone. A tile computes
the sum of each segment from its first step to its last, and the segments are added from left to
right. With few rows, a program computes one segment, so that even a small matrix occupies all
multiprocessors; XLA or the next kernel then adds them. With many rows a program computes all of
them. The additions are the same, and so are a row's bits. This relies on tensor cores treating the
columns of a product alike, for every width of x: `benchmarks/gpu_check.py` checks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.arrays import TILE

COLUMN_TILE = 64  # outputs: the weight is the left operand, of 64 rows on Hopper
ROW_TILES = (16, 32, 64)  # rows of x per program; the smallest that fits is taken
PROGRAMS = 264  # wanted: two for each multiprocessor of a large GPU

Refs = Mapping[str, Any]  # a kernel's operands by name


class Sums(NamedTuple):
    """A product's segments before they are added: a kernel that reads them saves a launch.

    parts: f32[segments, rows, columns]; the rows are M or more.
    first: the column of the first output.
    outputs: N.
    """

    parts: jax.Array
    first: int
    outputs: int

    def total(self, m: int) -> jax.Array:
        """The product, f32[M, N]."""
        total = reduce(jnp.add, [self.parts[part] for part in range(self.parts.shape[0])])
        return total[:m, self.first : self.first + self.outputs]


def add_segments(
    parts: jax.Ref, row: jax.Array, columns: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Adds the segments of some columns of a row, inside a kernel. parts: f32[segments, rows, N].

    Every segment is requested before the first addition.
    """
    segments = [load(parts.at[part, row, columns], mask) for part in range(parts.shape[0])]
    return reduce(jnp.add, segments)


def whole(array: Any) -> pl.BlockSpec:
    """Every program of a grid sees the whole array, or shape of one."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * len(array.shape))


class Tile(Protocol):
    """A tile of outputs of one matrix, inside the kernel."""

    def sum_steps(
        self, x: Refs, rows: jax.Array | None, begin: jax.Array, end: jax.Array
    ) -> jax.Array:
        """The sum over some steps of inputs, f32[COLUMN_TILE, M].

        x: the operands of `launch`, a tile of M rows; rows: int32[], those that there are; None for
        all. The sum is [N, M], because Hopper takes the left operand from registers, and that is
        the weight.
        """


# Makes the tile from the weight's arrays, its number in the stacks, and the outputs of the tile
# that the matrix has: int32[], None for all.
MakeTile = Callable[[Refs, jax.Array, jax.Array | None], Tile]


def steps_per_segment(outputs: int, steps: int, shortest: int) -> int:
    """Steps per segment, by the shape of the weight; a whole matrix of fewer is one segment.

    outputs: N; steps: over all inputs; shortest: steps of a segment that pay for its result.
    """
    columns = pl.cdiv(outputs, COLUMN_TILE)
    segments = max(1, min(pl.cdiv(PROGRAMS, columns), steps // shortest))
    return int(pl.cdiv(steps, segments))


def launch(
    make_tile: MakeTile,
    x: Mapping[str, jax.Array],
    of_groups: Mapping[str, jax.Array],
    weights: Sequence[Mapping[str, jax.Array]],
    indices: Sequence[jax.Array],
    outputs: Sequence[int],
    *,
    steps: int,
    per_segment: int,
    most_rows: int = ROW_TILES[-1],
    stages: int,
    interpret: bool,
) -> list[Sums]:
    """Multiplies x by weights of one kind and equal segments, in one kernel.

    Args:
      x: the operands that are the same for all outputs, [M, ...] each.
      of_groups: those by groups of inputs, [groups, M] each.
      weights: the arrays of every stack, [L, rows, ...]: a row for each output, or for TILE.
      indices: int32[], the matrix of each stack.
      outputs: N of each matrix.
      steps: of inputs.
      per_segment: steps of a segment.
      most_rows: of x per program, one of ROW_TILES.
      stages: steps whose operands are read ahead, plus one.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      For every weight the sums of its segments, of M rows.
    """
    m = next(iter(x.values())).shape[0]
    tile = min(next((tile for tile in ROW_TILES if tile >= m), ROW_TILES[-1]), most_rows)
    ends = list(itertools.accumulate(pl.cdiv(n, COLUMN_TILE) for n in outputs))
    firsts, rows, columns = [0, *ends[:-1]], pl.cdiv(m, tile), ends[-1]
    segments = pl.cdiv(steps, per_segment)
    parts = segments if rows * columns < PROGRAMS else 1

    def of_weight(number: int, array: jax.Array) -> pl.BlockSpec:
        first, last = firsts[number], ends[number] - 1
        layers, height, *rest = array.shape
        return pl.BlockSpec(
            (layers, COLUMN_TILE if height == outputs[number] else COLUMN_TILE // TILE, *rest),
            lambda i, j, s: (0, jnp.clip(j, first, last) - first, *(0 for _ in rest)),
        )

    sums: jax.Array = pl.pallas_call(
        partial(
            _kernel, make_tile=make_tile, m=m, outputs=outputs, firsts=firsts, ends=ends,
            steps=steps, per_segment=per_segment, segments=segments // parts,
        ),
        grid=(rows, columns, parts),
        in_specs=[
            {
                name: pl.BlockSpec((tile, array.shape[1]), lambda i, j, s: (i, 0))
                for name, array in x.items()
            } | {
                name: pl.BlockSpec((array.shape[0], tile), lambda i, j, s: (0, i))
                for name, array in of_groups.items()
            },
            [pl.BlockSpec((None,), lambda i, j, s: (0,)) for _ in indices],
            [
                {name: of_weight(number, array) for name, array in arrays.items()}
                for number, arrays in enumerate(weights)
            ],
        ],
        out_specs=pl.BlockSpec((None, tile, COLUMN_TILE), lambda i, j, s: (s, i, j)),
        out_shape=jax.ShapeDtypeStruct((parts, m, columns * COLUMN_TILE), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
    )({**x, **of_groups}, [each[None] for each in indices], list(map(dict, weights)))  # fmt: skip
    return [Sums(sums, first * COLUMN_TILE, n) for first, n in zip(firsts, outputs, strict=True)]


def _kernel(
    x: Refs, indices: Sequence[jax.Ref], weights: Sequence[Refs], y: jax.Ref, *,
    make_tile: MakeTile, m: int, outputs: Sequence[int], firsts: Sequence[int],
    ends: Sequence[int], steps: int, per_segment: int, segments: int,
) -> None:  # fmt: skip
    """Adds `segments` segments of a tile of outputs, of the weight that has it. y: f32[M, N]."""
    rows = m - pl.program_id(0) * y.shape[0] if m % y.shape[0] else None
    column, part = pl.program_id(1), pl.program_id(2)
    for number, (n, first, end) in enumerate(zip(outputs, firsts, ends, strict=True)):

        def own(number: int = number, n: int = n, first: int = first) -> None:
            rest = n - (column - first) * COLUMN_TILE if n % COLUMN_TILE else None
            tile = make_tile(weights[number], indices[number][...], rest)

            def segment(number: jax.Array) -> jax.Array:
                begin = number * per_segment
                return tile.sum_steps(x, rows, begin, jnp.minimum(begin + per_segment, steps))

            total = segment(part * segments)
            if segments > 1:
                total = lax.fori_loop(1, segments, lambda i, total: total + segment(i), total)
            there = inside(jnp.arange(y.shape[0])[:, None], rows)
            pltriton.store(y.at[:, :], total.T, mask=there)

        if len(outputs) == 1:
            own()
        else:
            pl.when((column >= first) & (column < end))(own)


def inside(places: jax.Array, count: jax.Array | int | None) -> jax.Array | None:
    """Which places are below a count; None if there is none."""
    return None if count is None else places < count


def both(first: jax.Array | None, second: jax.Array | None) -> jax.Array | None:
    """The conjunction of two masks, where None stands for all."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def load(at: Any, mask: jax.Array | None) -> jax.Array:
    """Loads values, zeros outside a mask that broadcasts to them."""
    values: jax.Array = pltriton.load(at, mask=mask, other=None if mask is None else 0)
    return values
