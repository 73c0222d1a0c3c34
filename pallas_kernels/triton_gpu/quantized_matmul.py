"""Matrix products for NVIDIA GPUs before Hopper: any quantized weight times 16-, 8- or 4-bit x.

One Pallas kernel reads the stored weight. It names Pallas's Triton backend explicitly, which Pallas
has deprecated in favour of Mosaic GPU. Mosaic GPU has products for these GPUs only since jax 0.11.
On Hopper this kernel serves the weights that `pallas_kernels.mosaic_gpu` does not.

`pallas_kernels.reference` defines the result. Rounding differs in two places: "a16" rounds a
float32 x to bfloat16 for the tensor cores, and scales multiply group sums instead of weights. A
weight's integers (for MXFP4, twice the values) are exact in bfloat16 and in int8, so precisions
differ only in x: bfloat16 with scales of one, or int8 with its own scales. Zeros are subtracted
exactly, from a bfloat16 weight or from an integer product. Minima add the value of the integer zero
times a group's sum of x. The planes of an 8-bit nested weight are joined as they are read;
`pallas_kernels.matmul` passes the draft plane alone where x has 8 or 4 bits.

Summation order: groups, k ascending; one product of ROW_TILE rows within a group. It depends only
on the weight's shape, so a row's bits do not depend on M.

Not implemented: tuned tiles (each ROW_TILE of rows unpacks the weight again), a split of K for
small N, a prepacked layout, and quantization of x inside the kernel. `pallas_kernels.matmul` adds
outliers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

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
    Rounded,
    padded_inputs,
)
from pallas_kernels.nested import NestedInt8Weight
from pallas_kernels.operands import check, group_parts, group_sums, multiplicands, product_dtype
from pallas_kernels.stacks import Stacked, in_stack, taken_shapes

Refs = dict[str, Any]  # a kernel's operands by name

ROW_TILE = 16  # the narrowest product
COLUMN_TILE = 64  # the weight is the left operand, and Hopper multiplies 64 of its rows
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul(
    x: jax.Array,
    weight: Rounded | Stacked,
    activation: Activation = "a16",
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes x · weightᵀ.

    Args:
      x: bf16 or f32[M, K].
      weight: [N, K], alone or in a stack.
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      f32[M, N].

    Raises:
      ValueError: the kernel does not serve a shape or dtype.
    """
    check(x, taken_shapes(weight), activation, Rounded if activation == "a16" else Quantized)
    one = in_stack(weight)
    weight = cast(Rounded, one.stack)
    m, n = x.shape[0], one.shape[0]
    x = jnp.pad(x, ((0, -m % ROW_TILE), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    values, x_scales = multiplicands(x, weight.group_size, activation)
    of_x = {"x": values, "x_scales": x_scales}
    of_weight = {"stored": weight.integers if isinstance(weight, Int8Weight) else weight.packed}
    of_weight |= {"rest": weight.rest} if isinstance(weight, NestedInt8Weight) else {}
    of_weight |= group_parts(weight)
    if "minima" in of_weight:
        of_x["x_sums"] = x_scales * group_sums(values, weight.group_size)
    # The result is padded to whole tiles. Padding the weight would copy it.
    rows, columns = x.shape[0] // ROW_TILE, pl.cdiv(n, COLUMN_TILE)
    specs = {
        name: pl.BlockSpec((ROW_TILE, array.shape[1]), lambda i, j: (i, 0))
        for name, array in of_x.items()
    } | {
        name: pl.BlockSpec((array.shape[0], COLUMN_TILE, array.shape[2]), lambda i, j: (0, j, 0))
        for name, array in of_weight.items()
    }
    specs["index"] = pl.BlockSpec((None,), lambda i, j: (0,))
    y: jax.Array = pl.pallas_call(
        partial(_kernel, n=n, kind=type(weight), group_size=weight.group_size),
        grid=(rows, columns),
        in_specs=[specs],
        out_specs=pl.BlockSpec((ROW_TILE, COLUMN_TILE), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows * ROW_TILE, columns * COLUMN_TILE), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(of_x | of_weight | {"index": one.index[None]})
    return y[:m, :n]


def _kernel(refs: Refs, y: jax.Ref, *, n: int, kind: type[Rounded], group_size: int | None) -> None:
    """Computes y: f32[M, N], a tile of M = ROW_TILE rows and N = COLUMN_TILE outputs.

    refs: x: bf16 or int8[M, K]; x_scales: f32[M, groups]; index: int32[], the matrix of the stacks;
    stored: uint8[L, N, K / 2] or int8[L, N, K]; scales: [L, N, groups]; if the weight has them,
    rest: uint8[L, N, K / 2], zeros: int8[L, N, groups], or minima: [L, N, groups] and
    x_sums: f32[M, groups]. The sum is [N, M], because Hopper takes the left operand from registers,
    and that is the weight.
    """
    refs = refs | {"index": refs["index"][...]}
    inside = (pl.program_id(1) * COLUMN_TILE + jnp.arange(COLUMN_TILE) < n)[:, None]
    x, width = refs["x"], group_size or PLANE
    # Without groups the sum has the products' dtype, because one scale multiplies all of it.
    dtype = product_dtype(x.dtype) if group_size is None else jnp.float32

    def add_block(block: jax.Array, total: jax.Array) -> jax.Array:
        for part in range(BLOCK // width):
            group = 0 if group_size is None else block * (BLOCK // width) + part
            weights = _integers(refs, kind, block, part * width, width, inside)
            zero = _column(refs, "zeros", group, inside) if "zeros" in refs else None
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
    refs: Refs, kind: type[Rounded], block: jax.Array, k: int, width: int, inside: jax.Array
) -> jax.Array:
    """The weight's `formats.integers` from input k of a block: int8[N, width]."""
    if kind is Int8Weight:
        return _columns(refs, "stored", pl.ds(block * BLOCK + k, width), inside)
    high = _nibbles(refs, "stored", block, k, width, inside)
    if kind is NestedInt8Weight:
        return high * 16 + _nibbles(refs, "rest", block, k, width, inside)
    return high if kind is Int4Weight else _twice_e2m1(high)


def _nibbles(
    refs: Refs, name: str, block: jax.Array, k: int, width: int, inside: jax.Array
) -> jax.Array:
    """The integers of one of the nibble planes from input k of a block: int8[N, width]."""
    pairs = _columns(refs, name, pl.ds(block * PLANE + k % PLANE, width), inside)
    signed = lax.bitcast_convert_type(pairs, jnp.int8)
    return signed << 4 >> 4 if k < PLANE else signed >> 4


def _twice_e2m1(code: jax.Array) -> jax.Array:
    """Doubles the values of sign-extended E2M1 codes: int8 -> int8."""
    low = code & 7
    magnitude = jnp.where(low < 2, low, (2 | low & 1) << jnp.maximum((low >> 1) - 1, 0))
    return jnp.where(code < 0, -magnitude, magnitude)


def _product(x: jax.Array, weights: jax.Array, zero: jax.Array | None) -> jax.Array:
    """Multiplies x: [M, width] by weights: [N, width], zero: int8[N, 1] -> f32 or i32[N, M]."""
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


def _column(refs: Refs, name: str, group: jax.Array | int, inside: jax.Array) -> jax.Array:
    """Loads one group's values: [N, 1]."""
    return _columns(refs, name, pl.ds(group, 1), inside)


def _columns(refs: Refs, name: str, columns: Any, inside: jax.Array) -> jax.Array:
    """Loads columns of one of the weight's arrays: [N, columns]."""
    return pltriton.load(refs[name].at[refs["index"], :, columns], mask=inside, other=0)


def _scaled(
    product: jax.Array, refs: Refs, kind: type[Rounded], group: jax.Array | int, inside: jax.Array
) -> jax.Array:
    """Scales a group's product and adds its minima: f32 or i32[N, M] -> f32[N, M]."""
    scale = _column(refs, "scales", group, inside)
    if kind is Mxfp4Weight:
        code = scale.astype(jnp.int32)
        bits = jnp.where(code == 255, 0x7FC00000, jnp.maximum(code << 23, 1 << 22))
        scale = lax.bitcast_convert_type(bits, jnp.float32) * 0.5  # see `formats.group_scales`
    scale = scale.astype(jnp.float32)
    if kind is NestedInt8Weight:
        scale /= 16
    scaled: jax.Array = product.astype(jnp.float32) * (scale * refs["x_scales"][:, group][None, :])
    if "minima" not in refs:
        return scaled
    least = _column(refs, "minima", group, inside).astype(jnp.float32)
    of_zero = least - cast(type[Quantized], kind).smallest * scale  # the value of the integer zero
    scaled += of_zero * refs["x_sums"][:, group][None, :]
    return scaled
