"""The product of bfloat16 x and a bfloat16 matrix, for NVIDIA GPUs from Ampere on.

XLA's own product is no alternative: it sums in another order for another number of rows.

The inputs are split into segments of whole steps, by the shape of the weight alone. The kernel
computes the sum of each segment from its first step to its last, and the segments are added from
left to right. With few rows, a program computes one segment, so that even a small matrix occupies
all multiprocessors; XLA then adds them. With many rows a program computes all of them. The
additions are the same, and so are a row's bits. This relies on tensor cores treating the columns of
a product alike, for every width of x: `benchmarks/gpu_check.py` checks it.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.formats import Bfloat16Weight
from pallas_kernels.stacks import Stacked, in_stack

STEP = 128  # inputs per product
ROW_TILES = (16, 32, 64, 128)  # rows of x per program; the smallest that fits is taken
COLUMN_TILE = 64  # outputs per program: the weight is the left operand, of 64 rows on Hopper
SHORTEST = 4  # steps of a segment; shorter sums would take longer to write than to compute
PROGRAMS = 264  # wanted: two for each multiprocessor of a large GPU
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul(x: jax.Array, weight: Bfloat16Weight | Stacked, *, interpret: bool = False) -> jax.Array:
    """Computes x · weightᵀ.

    Args:
      x: bf16[M, K].
      weight: (N, K), row by row, alone or in a stack.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      f32[M, N].

    Raises:
      ValueError: a shape or dtype is another one, or the weight's rows are interleaved.
    """
    one = in_stack(weight)
    stack = cast(Bfloat16Weight, one.stack)
    m, (n, k) = x.shape[0], one.shape
    if stack.out_features is not None or x.dtype != jnp.bfloat16 or x.shape[1:] != (k,):
        raise ValueError(
            "triton_gpu multiplies bfloat16 x by a bfloat16 matrix stored row by row, "
            f"got {x.dtype.name}{list(x.shape)} and a matrix of {(n, k)}"
        )
    tile = next((tile for tile in ROW_TILES if tile >= m), ROW_TILES[-1])
    rows, columns, steps = -(-m // tile), -(-n // COLUMN_TILE), -(-k // STEP)
    per_segment = steps_per_segment(columns, steps)
    segments = -(-steps // per_segment)
    parts = segments if rows * columns < PROGRAMS else 1
    x = jnp.pad(x, ((0, rows * tile - m), (0, steps * STEP - k)))
    values = lax.bitcast_convert_type(stack.bits, jnp.bfloat16)
    sums: jax.Array = pl.pallas_call(
        partial(_kernel, n=n, k=k, per_segment=per_segment, segments=segments // parts),
        grid=(rows, columns, parts),
        in_specs=[
            pl.BlockSpec((tile, x.shape[1]), lambda i, j, s: (i, 0)),
            pl.BlockSpec((None,), lambda i, j, s: (0,)),
            pl.BlockSpec((values.shape[0], COLUMN_TILE, k), lambda i, j, s: (0, j, 0)),
        ],
        out_specs=pl.BlockSpec((None, tile, COLUMN_TILE), lambda i, j, s: (s, i, j)),
        out_shape=jax.ShapeDtypeStruct((parts, rows * tile, columns * COLUMN_TILE), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
    )(x, one.index[None], values)
    total = sums[0]
    for part in range(1, parts):
        total += sums[part]
    return total[:m, :n]


def steps_per_segment(columns: int, steps: int) -> int:
    """Steps per segment, by the shape of the weight: tiles of outputs, steps over all inputs."""
    segments = max(1, min(-(-PROGRAMS // columns), steps // SHORTEST))
    return -(-steps // segments)


def _kernel(
    x: jax.Ref, index: jax.Ref, weights: jax.Ref, y: jax.Ref,
    *, n: int, k: int, per_segment: int, segments: int,
) -> None:  # fmt: skip
    """Adds `segments` segments of a tile.

    x: bf16[M, padded K]; weights: bf16[L, N, K], of which `index` is read; y: f32[M, N]. The sum
    is [N, M], because Hopper takes the weight, its left operand, from registers.
    """
    inside, number = None, index[...]
    if n % COLUMN_TILE:
        outputs = pl.program_id(1) * COLUMN_TILE + jnp.arange(COLUMN_TILE)
        inside = (outputs < n)[:, None]
    steps = x.shape[1] // STEP

    def add_step(step: jax.Array, total: jax.Array) -> jax.Array:
        inputs = pl.ds(step * STEP, STEP)
        mask = inside
        if k % STEP:
            real = (step * STEP + jnp.arange(STEP) < k)[None, :]
            mask = real if inside is None else inside & real
        other = None if mask is None else 0.0
        values = pltriton.load(weights.at[number, :, inputs], mask=mask, other=other)
        return total + lax.dot_general(
            values, x[:, inputs], _CONTRACT_LAST, preferred_element_type=jnp.float32
        )

    def segment(number: jax.Array) -> jax.Array:
        first = number * per_segment
        zeros = jnp.zeros((COLUMN_TILE, x.shape[0]), jnp.float32)
        end = jnp.minimum(first + per_segment, steps)
        sums: jax.Array = lax.fori_loop(first, end, add_step, zeros)
        return sums

    first = pl.program_id(2) * segments
    total = segment(first)
    if segments > 1:
        total = lax.fori_loop(1, segments, lambda i, total: total + segment(first + i), total)
    y[...] = total.T
