"""W4A16, W4A8 and W4A4 for TPUs: one Pallas kernel over the packed weight as it is stored.

The meaning is that of `pallas_kernels.reference`, with two differences of rounding: "a16" rounds a
float32 x to bfloat16 for the matrix unit, and the scale multiplies a group's sum, not every weight.
The weight's integers are exact in bfloat16 and in int8, so a precision is no more than a type of x:
bfloat16 with scales of one, or int8 with its own.

Order of summation: group after group, k ascending; within a group, what one product of ROW_TILE
rows does. It depends on the weight's shape alone, so a row's bits do not depend on M.

Left out: tiles chosen by measurement (many rows unpack the weight once per ROW_TILE of them), a
prepacked layout, quantizing x inside the kernel. TPU v4 multiplies no int8: there, "a16" only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import BLOCK, PLANE, Int4Weight, padded_inputs
from pallas_kernels.operands import check, multiplicands, product_dtype

ROW_TILE = 32  # the rows of one int8 register
COLUMN_TILE = 256
BLOCKS_PER_STEP = 8  # a step of the grid reads 256 KiB of weight
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
    # A section is what one index of the scales serves: a block, or all inputs without groups.
    sections = 1 if weight.group_size is None else x.shape[1] // BLOCK
    x_scales = x_scales.reshape(x.shape[0], sections, -1).transpose(1, 0, 2)
    w_scales = weight.scales.astype(jnp.float32).reshape(n, sections, -1).transpose(1, 2, 0)
    return _call(values, weight.packed, x_scales, w_scales, weight.group_size, interpret)[:m]


def _call(
    values: jax.Array,
    packed: jax.Array,
    x_scales: jax.Array,
    w_scales: jax.Array,
    group_size: int | None,
    interpret: bool,
) -> jax.Array:
    """The kernel over a grid of M, N and K, with K innermost.

    values: bf16 or int8[M, K], packed: uint8[N, K / 2], x_scales: f32[sections, M, groups],
    w_scales: f32[sections, groups, N] -> f32[M, N].
    """
    (m, _), (n, half) = values.shape, packed.shape
    blocks = half // PLANE
    per_step = min(BLOCKS_PER_STEP, blocks)
    tile = (ROW_TILE, COLUMN_TILE)
    return pl.pallas_call(
        partial(_kernel, blocks=blocks, group_size=group_size),
        grid=(m // ROW_TILE, pl.cdiv(n, COLUMN_TILE), pl.cdiv(blocks, per_step)),
        in_specs=_in_specs(per_step, *w_scales.shape[:2]),
        out_specs=pl.BlockSpec(tile, lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_shapes=[pltpu.VMEM(tile, _total_dtype(values.dtype, group_size))],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(values, packed, x_scales, w_scales)


def _in_specs(per_step: int, sections: int, groups: int) -> list[pl.BlockSpec]:
    """What step (i, j, k) reads: `per_step` blocks of inputs, or the only section of the scales."""
    size, many = min(per_step, sections), sections > 1
    return [
        pl.BlockSpec((ROW_TILE, per_step * BLOCK), lambda i, j, k: (i, k)),
        pl.BlockSpec((COLUMN_TILE, per_step * PLANE), lambda i, j, k: (j, k)),
        pl.BlockSpec((size, ROW_TILE, groups), lambda i, j, k: (k if many else 0, i, 0)),
        pl.BlockSpec((size, groups, COLUMN_TILE), lambda i, j, k: (k if many else 0, 0, j)),
    ]


def _total_dtype(dtype: jnp.dtype, group_size: int | None) -> jnp.dtype:
    """Without groups the sum stays what the products are: one scale multiplies all of it."""
    return product_dtype(dtype) if group_size is None else jnp.dtype(jnp.float32)


def _kernel(x, packed, x_scales, w_scales, y, total, *, blocks: int, group_size: int | None):
    """One step: adds up to BLOCKS_PER_STEP blocks of inputs to `total`; the last step writes y.

    x: bf16 or int8[M, K], packed: uint8[N, K / 2], x_scales: f32[sections, M, groups], w_scales:
    f32[sections, groups, N], y: f32[M, N], total: f32 or i32[M, N], where M is ROW_TILE, N is
    COLUMN_TILE and K the inputs of one step.
    """
    step, steps = pl.program_id(2), pl.num_programs(2)
    per_step = packed.shape[1] // PLANE

    @pl.when(step == 0)
    def start():
        total[...] = jnp.zeros_like(total)

    def add_block(block: jax.Array, carry: None) -> None:
        for group, product in enumerate(_products(x, packed, block, group_size)):
            if group_size is not None:
                product = product.astype(jnp.float32) * _scale(x_scales, w_scales, block, group)
            total[...] += product

    # The last step may be short; what lies beyond the weight's last block is never read.
    lax.fori_loop(0, jnp.minimum(per_step, blocks - step * per_step), add_block, None)

    @pl.when(step == steps - 1)
    def finish():
        scale = _scale(x_scales, w_scales, 0, 0) if group_size is None else 1
        y[...] = total[...].astype(jnp.float32) * scale


def _products(x, packed, block: jax.Array, group_size: int | None) -> Iterator[jax.Array]:
    """The products of one block, group after group (plane after plane): f32 or i32[M, N]."""
    width = group_size or PLANE
    values = x[:, pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK)]
    pairs = packed[:, pl.ds(pl.multiple_of(block * PLANE, PLANE), PLANE)].astype(jnp.int32)
    low, high = pairs << 28 >> 28, pairs << 24 >> 28
    for k in range(0, BLOCK, width):
        weights = (low if k < PLANE else high)[:, k % PLANE : k % PLANE + width]
        yield lax.dot_general(
            values[:, k : k + width],
            weights.astype(x.dtype),
            _CONTRACT_LAST,
            precision=lax.Precision.DEFAULT,
            preferred_element_type=product_dtype(x.dtype),
        )


def _scale(x_scales, w_scales, section: jax.Array | int, group: int) -> jax.Array:
    """The outer product of one group's scales, f32[M, N]."""
    return x_scales[section, :, pl.ds(group, 1)] * w_scales[section, pl.ds(group, 1), :]
