"""W4A16, W4A8 and W4A4 for NVIDIA GPUs: one Pallas kernel over the packed weight as it is stored.

The kernel is compiled by Pallas's Triton backend, by explicit choice. Pallas has deprecated that
backend in favour of Mosaic GPU, but there a matrix product is `wgmma` on hand-placed memory, which
the oldest jax that we support cannot interpret on a CPU; this kernel is what such a one is
compared with.

The meaning is that of `pallas_kernels.reference`, with two differences of rounding: "a16" rounds a
float32 x to bfloat16 for the tensor cores, and the scale multiplies a group's sum, not every
weight. The weight's integers are exact in bfloat16 and in int8, so a precision is no more than a
type of x: bfloat16 with scales of one, or int8 with its own.

Order of summation: group after group, k ascending; within a group, what one product of ROW_TILE
rows does. It depends on the weight's shape alone, so a row's bits do not depend on M.

Left out: tiles chosen by measurement (many rows unpack the weight once per ROW_TILE of them), a
split of K for small N, a prepacked layout, quantizing x inside the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.formats import BLOCK, PLANE, Int4Weight, padded_inputs
from pallas_kernels.operands import check, multiplicands, product_dtype

ROW_TILE = 16  # the narrowest product
COLUMN_TILE = 64  # the weight is the left operand, and 64 of its rows fill Hopper's product
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul(
    x: jax.Array, weight: Int4Weight, activation: str = "a16", *, interpret: bool = False
) -> jax.Array:
    """x: bf16 or f32[M, K] times weight: [N, K] -> f32[M, N].

    Args:
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Raises:
      ValueError: a shape or dtype that the kernel does not serve.
    """
    check(x, weight, activation)
    m, n = x.shape[0], weight.shape[0]
    x = jnp.pad(x, ((0, -m % ROW_TILE), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    values, x_scales = multiplicands(x, weight.group_size, activation)
    # The result is padded to whole tiles; the weight is not, since that would copy it.
    rows, columns = x.shape[0] // ROW_TILE, pl.cdiv(n, COLUMN_TILE)
    return pl.pallas_call(
        partial(_kernel, n=n, group_size=weight.group_size),
        grid=(rows, columns),
        in_specs=[
            pl.BlockSpec((ROW_TILE, values.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((COLUMN_TILE, weight.packed.shape[1]), lambda i, j: (j, 0)),
            pl.BlockSpec((ROW_TILE, x_scales.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((COLUMN_TILE, weight.scales.shape[1]), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((ROW_TILE, COLUMN_TILE), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows * ROW_TILE, columns * COLUMN_TILE), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(values, weight.packed, x_scales, weight.scales)[:m, :n]


def _kernel(x, packed, x_scales, w_scales, y, *, n: int, group_size: int | None):
    """One tile of y: f32[M, N], from all inputs of its rows and columns.

    x: bf16 or int8[M, K], packed: uint8[N, K / 2], x_scales: f32[M, groups], w_scales:
    [N, groups], where M is ROW_TILE and N is COLUMN_TILE. The sum is kept as [N, M], so that the
    weight is the left operand, which Hopper takes from registers.
    """
    inside = (pl.program_id(1) * COLUMN_TILE + jnp.arange(COLUMN_TILE) < n)[:, None]

    def add_block(block: jax.Array, total: jax.Array) -> jax.Array:
        for part, product in enumerate(_products(x, packed, block, inside, group_size)):
            if group_size is not None:
                group = block * (BLOCK // group_size) + part
                scale = _scale(x_scales, w_scales, group, inside)
                product = product.astype(jnp.float32) * scale
            total += product
        return total

    # Without groups the sum stays what the products are: one scale multiplies all of it.
    dtype = product_dtype(x.dtype) if group_size is None else jnp.float32
    zeros = jnp.zeros((COLUMN_TILE, ROW_TILE), dtype)
    total = lax.fori_loop(0, packed.shape[1] // PLANE, add_block, zeros).astype(jnp.float32)
    if group_size is None:
        total *= _scale(x_scales, w_scales, 0, inside)
    y[...] = total.T


def _products(
    x, packed, block: jax.Array, inside: jax.Array, group_size: int | None
) -> Iterator[jax.Array]:
    """The products of one block, group after group (plane after plane): f32 or i32[N, M]."""
    width = group_size or PLANE
    for k in range(0, BLOCK, width):
        columns = pl.ds(block * PLANE + k % PLANE, width)
        pairs = pltriton.load(packed.at[:, columns], mask=inside, other=0)
        signed = lax.bitcast_convert_type(pairs, jnp.int8)
        weights = signed << 4 >> 4 if k < PLANE else signed >> 4
        yield lax.dot_general(
            weights.astype(x.dtype),
            x[:, pl.ds(block * BLOCK + k, width)],
            _CONTRACT_LAST,
            precision=lax.Precision.DEFAULT,
            preferred_element_type=product_dtype(x.dtype),
        )


def _scale(x_scales, w_scales, group: jax.Array | int, inside: jax.Array) -> jax.Array:
    """The outer product of one group's scales, f32[N, M]."""
    column = pltriton.load(w_scales.at[:, pl.ds(group, 1)], mask=inside, other=0)
    return column.astype(jnp.float32) * x_scales[:, group][None, :]
