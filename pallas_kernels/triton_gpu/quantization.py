"""Dynamic quantization of activations for NVIDIA GPUs, in one launch (`activations`).

XLA takes a launch for the largest magnitudes, one for the scales and one for the integers. A
program serves one row, and of it PER_PROGRAM inputs where groups are independent.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.activations import LEVELS, Activation
from pallas_kernels.formats import BLOCK, padded_inputs

PER_PROGRAM = 1024  # inputs
_PER_WARP, _MOST_WARPS = 256, 16


def quantize(
    x: jax.Array,
    activation: Activation,
    group_size: int | None,
    *,
    rows: int | None = None,
    per_block: int | None = None,
    sums: int = 0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `activations.quantize_activations` of x with its inputs padded to whole blocks.

    Args:
      x: bf16 or f32[M, K].
      activation: "a8" or "a4".
      group_size: inputs per scale; None for one scale per row.
      rows: M of the result, the last ones zeros; None for x's own.
      per_block: rows of the second result for each block of inputs; None for as many as needed.
      sums: multiplies the sums of a block's groups of integers, which follow its scales; 0 for
        none.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      The integers, int8[M, padded K], and for each block the scales of its groups and then their
      sums, f32[blocks · per_block, M]. Without groups, one scale and one sum: f32[1 or 2, M].
    """
    m, k = x.shape
    rows, width = rows or m, padded_inputs(k)
    groups = BLOCK // group_size if group_size else 1
    per_block = per_block or groups * (1 + (sums != 0))
    size = PER_PROGRAM if group_size else pl.next_power_of_2(width)
    blocks = width // BLOCK if group_size else 1
    q, found = pl.pallas_call(
        partial(
            _kernel, m=m, width=width, size=size, group_size=group_size or size, groups=groups,
            per_block=per_block, sums=sums, level=LEVELS[activation], interpreted=interpret,
        ),
        grid=(rows, pl.cdiv(width, size)),
        in_specs=[pl.BlockSpec((m, k), lambda i, j: (0, 0))],
        out_specs=[
            pl.BlockSpec((rows, width), lambda i, j: (0, 0)),
            pl.BlockSpec((blocks * per_block, rows), lambda i, j: (0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, width), jnp.int8),
            jax.ShapeDtypeStruct((blocks * per_block, rows), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(
            num_warps=min(size // _PER_WARP, _MOST_WARPS) or 1, num_stages=1
        ),
        interpret=interpret,
    )(x)  # fmt: skip
    return q, found


def _kernel(
    x: jax.Ref, q: jax.Ref, found: jax.Ref, *, m: int, width: int, size: int, group_size: int,
    groups: int, per_block: int, sums: int, level: int, interpreted: bool,
) -> None:  # fmt: skip
    """x: [M, K]; q: int8[rows, padded K]; found: f32[blocks · per_block, rows]."""
    row, first = pl.program_id(0), pl.program_id(1) * size
    inputs = first + jnp.arange(size)
    real = (inputs < x.shape[1]) & (row < m)
    values = pltriton.load(x.at[row, inputs], mask=real, other=0).astype(jnp.float32)
    parts = values.reshape(size // group_size, group_size)
    scales = jnp.max(jnp.abs(parts), axis=1) * np.float32(1 / level)
    scales = jnp.where(scales < np.finfo(np.float32).tiny, 0, scales)
    inverse = jnp.where(scales == 0, 0, _reciprocal(jnp.where(scales == 0, 1, scales), interpreted))
    inverse = jnp.broadcast_to(inverse[:, None], parts.shape)
    integers = _rounded_product(parts, inverse, interpreted)
    whole = integers.reshape(size).astype(jnp.int8)
    pltriton.store(q.at[row, inputs], whole, mask=inputs < width)
    group = first // group_size + jnp.arange(size // group_size)
    place = group // groups * per_block + group % groups
    there = group * group_size < width
    pltriton.store(found.at[place, row], scales, mask=there)
    if sums:
        total = jnp.sum(integers, axis=1) * sums  # exact: below 2^24
        pltriton.store(found.at[place + groups, row], total, mask=there)


def _reciprocal(values: jax.Array, interpreted: bool) -> jax.Array:
    return 1 / values if interpreted else _assembly("rcp.rn.f32 $0, $1;", values)


def _rounded_product(x: jax.Array, y: jax.Array, interpreted: bool) -> jax.Array:
    """x · y in float32, then rounded to an integer, ties to even."""
    if interpreted:
        return jnp.round(x * y)
    product = "{.reg .f32 product; mul.rn.f32 product, $1, $2; cvt.rni.f32.f32 $0, product;}"
    return _assembly(product, x, y)


def _assembly(code: str, *operands: jax.Array) -> jax.Array:
    """An operation on float32 that the compiler neither approximates nor fuses, so that a half is
    rounded as `quantize_activations` does."""
    [result] = pltriton.elementwise_inline_asm(
        code,
        args=operands,
        constraints=",".join(["=f"] + ["f"] * len(operands)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)],
    )
    return result
