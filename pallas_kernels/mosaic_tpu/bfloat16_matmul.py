"""The product of bfloat16 x and a bfloat16 matrix, for TPUs.

XLA's own product cannot serve here: it may sum in another order for another number of rows. A step
of the grid reads a tile of outputs with all of their inputs, and adds the products of STEP inputs,
k ascending. The order depends on the weight's shape alone, so a row's bits do not depend on M; as
in `quantized_matmul`, this relies on Mosaic's `shape_invariant_numerics`, and has not been verified
on a TPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import Bfloat16Weight
from pallas_kernels.mosaic_tpu import tiles

STEP = 1024  # inputs of one product
USUAL_VMEM = 16 * 2**20  # bytes that a kernel gets unless it asks for more
ROOM = 4 * 2**20  # for a step's products
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul(x: jax.Array, weight: Bfloat16Weight, *, interpret: bool = False) -> jax.Array:
    """Computes x · weightᵀ.

    Args:
      x: bf16[M, K].
      weight: (N, K), row by row.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      f32[M, N].

    Raises:
      ValueError: a shape or dtype is another one, or the weight's rows are interleaved.
    """
    (m, k), n = x.shape, weight.shape[0]
    if x.dtype != jnp.bfloat16 or weight.shape[1] != k or weight.out_features is not None:
        raise ValueError(
            "mosaic_tpu multiplies bfloat16 x by bfloat16 matrices stored row by row, "
            f"got {x.dtype.name}{list(x.shape)} and a matrix of {weight.shape}"
        )
    tile = tiles.choose(m, n, weight_bytes=2 * k, row_bytes=2 * k, packing=16, groups_per_plane=1)
    copies = 1 if tile.count == 1 else 2  # a single tile of rows is copied once
    held = 2 * k * (copies * tile.rows + 2 * tile.columns) + 8 * tile.rows * tile.columns
    y: jax.Array = pl.pallas_call(
        _kernel,
        grid=(tile.count, pl.cdiv(n, tile.columns)),
        in_specs=[
            pl.BlockSpec((tile.rows, k), lambda i, j: (i, 0), pipeline_mode=pl.Buffered(copies)),
            pl.BlockSpec((tile.columns, k), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((tile.rows, tile.columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((tile.count * tile.rows, n), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=max(USUAL_VMEM, held + ROOM),
        ),
        interpret=interpret,
    )(
        jnp.pad(x, ((0, tile.count * tile.rows - m), (0, 0))),
        lax.bitcast_convert_type(weight.bits, jnp.bfloat16),
    )
    return y[:m]


def _kernel(x: jax.Ref, weight: jax.Ref, y: jax.Ref) -> None:
    """Computes y: f32[M, N], a tile of rows and outputs. x: bf16[M, K]; weight: bf16[N, K]."""
    k = x.shape[1]

    def product(inputs: Any) -> jax.Array:
        return lax.dot_general(
            x[:, inputs], weight[:, inputs], _CONTRACT_LAST, precision=lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    def add(step: jax.Array, carry: None) -> None:
        y[...] += product(pl.ds(pl.multiple_of(step * STEP, STEP), STEP))

    y[...] = jnp.zeros_like(y)
    if k >= STEP:
        lax.fori_loop(0, k // STEP, add, None)
    if k % STEP:
        y[...] += product(pl.ds(k // STEP * STEP, k % STEP))
