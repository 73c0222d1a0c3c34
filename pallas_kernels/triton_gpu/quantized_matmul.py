"""Every quantized weight times activations of 16, 8 or 4 bits, for NVIDIA GPUs before Hopper.

One Pallas kernel over the weight as it is stored, compiled by Pallas's Triton backend, by explicit
choice. Pallas has deprecated that backend in favour of Mosaic GPU, which on these GPUs multiplies
only since jax 0.11. On Hopper it serves what `pallas_kernels.mosaic_gpu` does not.

The meaning is that of `pallas_kernels.reference`, with two differences of rounding: "a16" rounds a
float32 x to bfloat16 for the tensor cores, and the scale multiplies a group's sum, not every
weight. A weight's integers (of MXFP4, twice the values) are exact in bfloat16 and in int8, so a
precision is no more than a type of x: bfloat16 with scales of one, or int8 with its own. Zeros are
subtracted where that is exact: from the weight in bfloat16, from the product among integers. Minima
are added to the sums of groups, by the value of the integer zero times the sum of x.

Order of summation: group after group, k ascending; within a group, what one product of ROW_TILE
rows does. It depends on the weight's shape alone, so a row's bits do not depend on M.

Left out: tiles chosen by measurement (many rows unpack the weight once per ROW_TILE of them), a
split of K for small N, a prepacked layout, quantizing x inside the kernel, outliers
(`pallas_kernels.matmul` adds them).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.activations import Activation
from pallas_kernels.formats import (
    BLOCK,
    PLANE,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    Quantized,
    padded_inputs,
)
from pallas_kernels.operands import check, group_parts, group_sums, multiplicands, product_dtype

Refs = dict[str, jax.Ref]  # a kernel's operands by name

ROW_TILE = 16  # the narrowest product
COLUMN_TILE = 64  # the weight is the left operand, and 64 of its rows fill Hopper's product
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul(
    x: jax.Array, weight: Quantized, activation: Activation = "a16", *, interpret: bool = False
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
    of_x = {"x": values, "x_scales": x_scales}
    of_weight = {"stored": weight.integers if isinstance(weight, Int8Weight) else weight.packed}
    of_weight |= group_parts(weight)
    if "minima" in of_weight:
        of_x["x_sums"] = x_scales * group_sums(values, weight.group_size)
    # The result is padded to whole tiles; the weight is not, since that would copy it.
    rows, columns = x.shape[0] // ROW_TILE, pl.cdiv(n, COLUMN_TILE)
    specs = {
        name: pl.BlockSpec((ROW_TILE, array.shape[1]), lambda i, j: (i, 0))
        for name, array in of_x.items()
    } | {
        name: pl.BlockSpec((COLUMN_TILE, array.shape[1]), lambda i, j: (j, 0))
        for name, array in of_weight.items()
    }
    y: jax.Array = pl.pallas_call(
        partial(_kernel, n=n, kind=type(weight), group_size=weight.group_size),
        grid=(rows, columns),
        in_specs=[specs],
        out_specs=pl.BlockSpec((ROW_TILE, COLUMN_TILE), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows * ROW_TILE, columns * COLUMN_TILE), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(of_x | of_weight)
    return y[:m, :n]


def _kernel(
    refs: Refs, y: jax.Ref, *, n: int, kind: type[Quantized], group_size: int | None
) -> None:
    """One tile of y: f32[M, N], from all inputs of its rows and columns.

    refs: x: bf16 or int8[M, K], x_scales: f32[M, groups], stored: uint8[N, K / 2] or int8[N, K],
    scales: [N, groups], and what else the weight has: zeros: int8[N, groups], or minima: [N,
    groups] with x_sums: f32[M, groups], where M is ROW_TILE and N is COLUMN_TILE. The sum is kept
    as [N, M], so that the weight is the left operand, which Hopper takes from registers.
    """
    inside = (pl.program_id(1) * COLUMN_TILE + jnp.arange(COLUMN_TILE) < n)[:, None]
    x, width = refs["x"], group_size or PLANE
    # Without groups the sum stays what the products are: one scale multiplies all of it.
    dtype = product_dtype(x.dtype) if group_size is None else jnp.float32

    def add_block(block: jax.Array, total: jax.Array) -> jax.Array:
        for part in range(BLOCK // width):
            group = 0 if group_size is None else block * (BLOCK // width) + part
            weights = _integers(refs["stored"], kind, block, part * width, width, inside)
            zero = _column(refs["zeros"], group, inside) if "zeros" in refs else None
            values = x[:, pl.ds(block * BLOCK + part * width, width)]
            product = _product(values, weights.astype(x.dtype), zero)
            if group_size is not None:
                product = _scaled(product, refs, kind, group, inside)
            total += product
        return total

    blocks = x.shape[1] // BLOCK
    total = lax.fori_loop(0, blocks, add_block, jnp.zeros((COLUMN_TILE, ROW_TILE), dtype))
    if group_size is None:
        total = _scaled(total, refs, kind, 0, inside)
    y[...] = total.T


def _integers(
    stored: jax.Ref, kind: type[Quantized], block: jax.Array, k: int, width: int, inside: jax.Array
) -> jax.Array:
    """The weight's integers from input k of a block on: int8[N, width] (`formats.integers`)."""
    if kind is Int8Weight:
        return pltriton.load(stored.at[:, pl.ds(block * BLOCK + k, width)], mask=inside, other=0)
    columns = pl.ds(block * PLANE + k % PLANE, width)
    pairs = pltriton.load(stored.at[:, columns], mask=inside, other=0)
    signed = lax.bitcast_convert_type(pairs, jnp.int8)
    signed = signed << 4 >> 4 if k < PLANE else signed >> 4
    return signed if kind is Int4Weight else _twice_e2m1(signed)


def _twice_e2m1(code: jax.Array) -> jax.Array:
    """Sign-extended E2M1 codes to twice their values, int8."""
    low = code & 7
    magnitude = jnp.where(low < 2, low, (2 | low & 1) << jnp.maximum((low >> 1) - 1, 0))
    return jnp.where(code < 0, -magnitude, magnitude)


def _product(x: jax.Array, weights: jax.Array, zero: jax.Array | None) -> jax.Array:
    """x: [M, width], weights: [N, width] of one dtype, zero: int8[N, 1] -> f32 or i32[N, M]."""
    if zero is not None and x.dtype != jnp.int8:
        weights -= zero.astype(x.dtype)  # at most 135: exact
    product = lax.dot_general(
        weights,
        x,
        _CONTRACT_LAST,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=product_dtype(x.dtype),
    )
    if zero is not None and x.dtype == jnp.int8:
        product -= zero.astype(jnp.int32) * jnp.sum(x.astype(jnp.int32), axis=1)[None, :]
    return product


def _column(ref: jax.Ref, group: jax.Array | int, inside: jax.Array) -> jax.Array:
    """One group's values, [N, 1]."""
    return pltriton.load(ref.at[:, pl.ds(group, 1)], mask=inside, other=0)


def _scaled(
    product: jax.Array, refs: Refs, kind: type[Quantized], group: jax.Array | int, inside: jax.Array
) -> jax.Array:
    """A group's product: f32 or i32[N, M], scaled, and with its minima: f32[N, M]."""
    scale = _column(refs["scales"], group, inside)
    if kind is Mxfp4Weight:
        code = scale.astype(jnp.int32)
        bits = jnp.where(code == 255, 0x7FC00000, jnp.maximum(code << 23, 1 << 22))
        scale = lax.bitcast_convert_type(bits, jnp.float32) * 0.5  # as `formats.group_scales`
    scale = scale.astype(jnp.float32)
    scaled: jax.Array = product.astype(jnp.float32) * (scale * refs["x_scales"][:, group][None, :])
    if "minima" not in refs:
        return scaled
    least = _column(refs["minima"], group, inside).astype(jnp.float32)
    of_zero = least - kind.smallest * scale  # the value of the integer zero
    scaled += of_zero * refs["x_sums"][:, group][None, :]
    return scaled
