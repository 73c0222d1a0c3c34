"""W4A16, W4A8 and W4A4 for TPUs: one Pallas kernel over the packed weight as it is stored.

The meaning is that of `pallas_kernels.reference`, with two differences of rounding: "a16" rounds a
float32 x to bfloat16 for the matrix unit, and the group's scale is applied to the partial sum
instead of to every weight. The integers of the weight are exact in bfloat16 and in int8, so what
is left of a precision is the type of x: bfloat16 with scales of one, or int8 with its own scales.

Order of summation: the groups one after another, k ascending. It depends on the shape of the
weight alone, and every tile of rows has ROW_TILE rows, so a row's bits do not depend on M.

Left out: a prepacked layout, tiles tuned by measurement (many rows unpack the weight once per
ROW_TILE of them), quantization of x inside the kernel. TPU v4 has no int8 product: "a16" only.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.activations import check_activation, quantize_activations
from pallas_kernels.formats import BLOCK, PLANE, Int4Weight, check_group_size

ROW_TILE = 32  # rows of one int8 register tile
COLUMN_TILE = 256
BLOCKS_PER_STEP = 8  # 256 KiB of packed weight per step of the grid
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul(
    x: jax.Array, weight: Int4Weight, activation: str = "a16", *, interpret: bool = False
) -> jax.Array:
    """x: bf16 or f32[M, K] times weight: [N, K] -> f32[M, N].

    Args:
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      interpret: evaluate the kernel step by step in XLA operations, on any platform.

    Raises:
      ValueError: a shape or dtype that the kernel does not serve.
    """
    _check(x, weight, activation)
    m, n = x.shape[0], weight.shape[0]
    x = jnp.pad(x, ((0, -m % ROW_TILE), (0, 2 * weight.packed.shape[1] - x.shape[1])))
    values, x_scales = _integers_or_bf16(x, weight.group_size, activation)
    sections = 1 if weight.group_size is None else weight.packed.shape[1] // PLANE
    x_scales = x_scales.reshape(x.shape[0], sections, -1).transpose(1, 0, 2)
    w_scales = weight.scales.astype(jnp.float32).reshape(n, sections, -1).transpose(1, 2, 0)
    call = _call(x.shape[0], n, weight, x_scales.shape[2], values.dtype, interpret)
    return call(values, weight.packed, x_scales, w_scales)[:m]


def _check(x: jax.Array, weight: Int4Weight, activation: str) -> None:
    check_activation(activation)
    if not isinstance(weight, Int4Weight):
        raise ValueError(f"weight must be an Int4Weight, got {type(weight).__name__}")
    check_group_size(weight.group_size)
    if x.ndim != 2 or x.shape[0] == 0 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must have shape (M > 0, {weight.shape[1]}), got {x.shape}")
    if x.dtype.name not in ("bfloat16", "float32"):
        raise ValueError(f"x must be bfloat16 or float32, got {x.dtype.name}")


def _integers_or_bf16(
    x: jax.Array, group_size: int | None, activation: str
) -> tuple[jax.Array, jax.Array]:
    """x: [M, K] -> what the matrix unit multiplies, int8 or bf16[M, K], and f32[M, groups]."""
    if activation != "a16":
        return quantize_activations(x.astype(jnp.float32), activation, group_size)
    groups = x.shape[1] // (group_size or x.shape[1])
    return x.astype(jnp.bfloat16), jnp.ones((x.shape[0], groups), jnp.float32)


def _call(m: int, n: int, weight: Int4Weight, groups: int, dtype: jnp.dtype, interpret: bool):
    """The `pallas_call` for values: [M, K], packed: [N, K / 2] and the scales of both by section.

    A section is what shares a slice of the scales: a block of the weight with `groups` groups, or
    the whole input where there is one scale per channel. x_scales: f32[sections, M, groups],
    w_scales: f32[sections, groups, N].
    """
    blocks = weight.packed.shape[1] // PLANE
    step = min(BLOCKS_PER_STEP, blocks)
    grouped = weight.group_size is not None
    sections = step if grouped else 1
    by_section = (lambda k: k) if grouped else (lambda k: 0)
    accumulator = jnp.int32 if dtype == jnp.int8 and not grouped else jnp.float32
    return pl.pallas_call(
        partial(_kernel, blocks=blocks, group_size=weight.group_size),
        grid=(m // ROW_TILE, pl.cdiv(n, COLUMN_TILE), pl.cdiv(blocks, step)),
        in_specs=[
            pl.BlockSpec((ROW_TILE, step * BLOCK), lambda i, j, k: (i, k)),
            pl.BlockSpec((COLUMN_TILE, step * PLANE), lambda i, j, k: (j, k)),
            pl.BlockSpec((sections, ROW_TILE, groups), lambda i, j, k: (by_section(k), i, 0)),
            pl.BlockSpec((sections, groups, COLUMN_TILE), lambda i, j, k: (by_section(k), 0, j)),
        ],
        out_specs=pl.BlockSpec((ROW_TILE, COLUMN_TILE), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_shapes=[pltpu.VMEM((ROW_TILE, COLUMN_TILE), accumulator)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )


def _kernel(x, packed, x_scales, w_scales, y, total, *, blocks: int, group_size: int | None):
    """One step: adds up to BLOCKS_PER_STEP blocks of inputs to `total`: f32 or i32[M, N]."""
    step, steps = pl.program_id(2), pl.num_programs(2)
    per_step = packed.shape[1] // PLANE

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    def add_block(block: jax.Array, carry: None) -> None:
        for group, product in enumerate(_products(x, packed, block, group_size)):
            if group_size is not None:
                product = product.astype(jnp.float32) * _scale(x_scales, w_scales, block, group)
            total[...] += product

    # The last step may be short: what the block holds beyond the weight is never read.
    lax.fori_loop(0, jnp.minimum(per_step, blocks - step * per_step), add_block, None)

    @pl.when(step == steps - 1)
    def _():
        scale = 1 if group_size is not None else _scale(x_scales, w_scales, 0, 0)
        y[...] = total[...].astype(jnp.float32) * scale


def _products(x, packed, block: jax.Array, group_size: int | None):
    """Yields the products of one block, group by group: f32 or i32[M, N]."""
    columns = pl.ds(pl.multiple_of(block * PLANE, PLANE), PLANE)
    pairs = packed[:, columns].astype(jnp.int32)
    width = group_size or PLANE
    for plane, nibble in enumerate((pairs << 28 >> 28, pairs << 24 >> 28)):
        weights = nibble.astype(x.dtype)
        start = pl.multiple_of(block * BLOCK + plane * PLANE, PLANE)
        values = x[:, pl.ds(start, PLANE)]
        for k in range(0, PLANE, width):
            yield lax.dot_general(
                values[:, k : k + width],
                weights[:, k : k + width],
                _CONTRACT_LAST,
                preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
            )


def _scale(x_scales, w_scales, section: jax.Array | int, group: int) -> jax.Array:
    """The outer product of one group's scales, f32[M, N]."""
    return x_scales[section, :, pl.ds(group, 1)] * w_scales[section, pl.ds(group, 1), :]
