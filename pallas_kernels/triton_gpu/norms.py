"""The root-mean-square norm for NVIDIA GPUs, one row per program.

XLA cannot serve here: it sums the squares of several rows in another order than those of one.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels.stacks import Stacked, in_stack

_PER_WARP = 256  # features: eight per thread, which one load of bfloat16 brings
_MOST_WARPS = 16


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
        compiler_params=pltriton.CompilerParams(
            num_warps=min(max(padded // _PER_WARP, 1), _MOST_WARPS), num_stages=1
        ),
        interpret=interpret,
    )(rows, one.stack, one.index[None])
    return y.reshape(x.shape)


def _kernel(
    x: jax.Ref, scale: jax.Ref, layer: jax.Ref, y: jax.Ref, *, eps: float, width: int
) -> None:
    """x, y: [D], scale: [L, D], layer: int32[], where D is `width` padded to a power of two."""
    inside = jnp.arange(x.shape[0]) < width
    values, scales = (
        pltriton.load(at, mask=inside, other=0).astype(jnp.float32)
        for at in (x.at[:], scale.at[layer[...], :])
    )
    inverse = lax.rsqrt(jnp.sum(values * values) / width + eps)
    pltriton.store(y.at[:], (values * inverse * scales).astype(y.dtype), mask=inside)
