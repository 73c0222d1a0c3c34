"""The root-mean-square norm for NVIDIA GPUs, one row per program.

XLA cannot serve here: it sums the squares of several rows in another order than those of one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels.stacks import Stacked, in_stack
from pallas_kernels.triton_gpu.readings import Operand, Reading, warps
from pallas_kernels.triton_gpu.segments import Sums, add_segments, whole


def rms_norm(
    x: jax.Array,
    scale: jax.Array | Stacked,
    eps: float,
    dtype: DTypeLike = jnp.float32,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes `pallas_kernels.norms.rms_norm`; arguments as there.

    Args:
      interpret: runs the kernel as ordinary XLA operations, on any platform.
    """
    if x.size == 0:
        return jnp.zeros(x.shape, dtype)
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    padded, one = pl.next_power_of_2(width), in_stack(scale)
    y: jax.Array = pl.pallas_call(
        partial(_kernel, eps=eps, width=width),
        grid=(rows.shape[0],),
        in_specs=[
            pl.BlockSpec((None, padded), lambda i: (i, 0)),
            pl.BlockSpec((one.stack.shape[0], padded), lambda i: (0, 0)),
            pl.BlockSpec((None,), lambda i: (0,)),
        ],
        out_specs=pl.BlockSpec((None, padded), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(rows.shape, dtype),
        compiler_params=pltriton.CompilerParams(num_warps=_warps(padded), num_stages=1),
        interpret=interpret,
    )(rows, one.stack, one.index[None])
    return y.reshape(x.shape)


def _kernel(
    x: jax.Ref, scale: jax.Ref, layer: jax.Ref, y: jax.Ref, *, eps: float, width: int
) -> None:
    """x, y: [D], scale: [L, D], layer: int32[], where D is `width` padded to a power of two."""
    inside = jnp.arange(x.shape[0]) < width
    values = pltriton.load(x.at[:], mask=inside, other=0).astype(jnp.float32)
    scales = _scales(scale, layer[...], inside)
    pltriton.store(y.at[:], _normed(values, scales, eps, width).astype(y.dtype), mask=inside)


def _scales(scale: jax.Ref, layer: jax.Array, inside: jax.Array) -> jax.Array:
    """A layer's scales, f32[D], zeros outside of the row. scale: [L, D]."""
    at = scale.at[layer, jnp.arange(inside.shape[0])]
    scales: jax.Array = pltriton.load(at, mask=inside, other=0)
    return scales.astype(jnp.float32)


def _normed(values: jax.Array, scales: jax.Array, eps: float, width: int) -> jax.Array:
    """The norm of a row, f32[D]."""
    return values * lax.rsqrt(jnp.sum(values * values) / width + eps) * scales


def add_and_norm(
    x: jax.Array,
    update: Sums,
    scale: Stacked,
    eps: float,
    reading: Reading,
    *,
    ahead: int = 0,
    interpret: bool = False,
) -> tuple[jax.Array, Operand]:
    """Adds a product to the residual stream, in place, and takes the norm for the next product.

    The bits are those of the sum of segments, the addition, `rms_norm` and `readings.read` one by
    one: three to five launches.

    Args:
      x: bf16[M, D].
      update: D columns.
      scale: bf16 or f32[D] in a stack.
      eps: added to the mean.
      reading: of the next product; D is its K.
      ahead: added to the scale's number, as far as the stack goes. XLA would take a launch.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      x + update, bf16[M, D], and its norm, rounded to bfloat16 and as the next product reads it.
    """
    shapes = reading.shapes()
    size = pl.next_power_of_2(max(x.shape[1], reading.width))
    arrays: list[Any] = [x, update.parts, scale.stack, scale.index[None]]
    added, *operand = pl.pallas_call(
        partial(
            _add_and_norm, first=update.first, eps=eps, size=size, reading=reading, ahead=ahead,
            interpreted=interpret,
        ),
        grid=(reading.rows,),
        in_specs=[whole(each) for each in arrays],
        out_specs=[whole(each) for each in (x, *shapes)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), *shapes],
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(num_warps=_warps(size), num_stages=1),
        interpret=interpret,
    )(*arrays)  # fmt: skip
    return added, tuple(operand)


def _warps(size: int) -> int:
    """Warps of few features a thread, whose loads are all on their way together."""
    return warps(size, per_thread=2, most=32)


def _add_and_norm(
    x: jax.Ref, parts: jax.Ref, scale: jax.Ref, layer: jax.Ref, added: jax.Ref,
    *operand: jax.Ref, first: int, eps: float, size: int, reading: Reading, ahead: int,
    interpreted: bool,
) -> None:  # fmt: skip
    """x, added: bf16[M, D], the same memory; parts: f32[P, rows, columns]; scale: [L, D]."""
    (m, width), inputs = x.shape, jnp.arange(size)
    row = pl.program_id(0)
    inside = inputs < width
    real = inside & (row < m)
    # No load comes after a store or a sum over the row, which it would wait for.
    scales = _scales(scale, jnp.minimum(layer[0] + ahead, scale.shape[0] - 1), inside)
    update = add_segments(parts, row, first + inputs, real)
    before = pltriton.load(x.at[row, inputs], mask=real, other=0).astype(jnp.float32)
    after = (before + update).astype(added.dtype)
    pltriton.store(added.at[row, inputs], after, mask=real)
    normed = _normed(after.astype(jnp.float32), scales, eps, width)
    normed = normed.astype(jnp.bfloat16).astype(jnp.float32)
    reading.store(row, 0, normed, operand, interpreted)
