"""The gate of SwiGLU for NVIDIA GPUs, stored as the next product reads it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels.triton_gpu.readings import PER_PROGRAM, Operand, Reading, warps
from pallas_kernels.triton_gpu.segments import Sums, add_segments, whole


def swiglu(
    gate: jax.Array, up: jax.Array, dtype: DTypeLike = jnp.float32, *, interpret: bool = False
) -> jax.Array:
    """Computes `pallas_kernels.swiglu.swiglu`; arguments as there.

    Args:
      interpret: runs the kernel as ordinary XLA operations, on any platform.
    """
    width = gate.shape[-1]
    rows = [each.reshape(1, -1, width) for each in (gate, up)]
    m = rows[0].shape[1]
    if 0 in (m, width):
        return jnp.zeros(gate.shape, dtype)
    shape = jax.ShapeDtypeStruct((m, width), dtype)
    sums = [Sums(each, 0, width) for each in rows]
    [hidden] = _call(sums, m, None, PER_PROGRAM, [shape], interpret)
    return hidden.reshape(gate.shape)


def gated(gate: Sums, up: Sums, m: int, reading: Reading, *, interpret: bool = False) -> Operand:
    """Computes silu(gate) · up, rounds it to bfloat16 and stores it as the next product reads it.

    Args:
      gate, up: products of M rows.
      reading: of the next product; its K are their outputs.
      interpret: runs the kernel as ordinary XLA operations, on any platform.
    """
    size, shapes = reading.per_program, reading.shapes()
    return tuple(_call([gate, up], m, reading, size, shapes, interpret))


def _call(
    sums: list[Sums], m: int, reading: Reading | None, size: int,
    shapes: list[jax.ShapeDtypeStruct], interpret: bool,
) -> list[jax.Array]:  # fmt: skip
    """Runs the kernel, whose programs serve `size` inputs of a row. Returns arrays of `shapes`."""
    rows, width = shapes[0].shape
    arrays = [each.parts for each in sums]
    found: list[jax.Array] = pl.pallas_call(
        partial(
            _kernel, firsts=[each.first for each in sums], m=m, inputs=sums[0].outputs, size=size,
            reading=reading, interpreted=interpret,
        ),
        grid=(rows, pl.cdiv(width, size)),
        in_specs=[whole(each) for each in arrays],
        out_specs=[whole(each) for each in shapes],
        out_shape=shapes,
        compiler_params=pltriton.CompilerParams(num_warps=warps(size), num_stages=1),
        interpret=interpret,
    )(*arrays)  # fmt: skip
    return found


def _kernel(
    gate: jax.Ref, up: jax.Ref, *out: jax.Ref, firsts: list[int], m: int, inputs: int, size: int,
    reading: Reading | None, interpreted: bool,
) -> None:  # fmt: skip
    """A program serves one row, and of it `size` inputs.

    gate, up: f32[P, rows, columns]; out: arrays of the reading, or [M, inputs] without one.
    """
    row, first = pl.program_id(0), pl.program_id(1) * size
    places = first + jnp.arange(size)
    real = (places < inputs) & (row < m)
    both = [
        add_segments(parts, row, column + places, real)
        for parts, column in zip((gate, up), firsts, strict=True)
    ]
    hidden = jax.nn.silu(both[0]) * both[1]
    if reading is None:
        pltriton.store(out[0].at[row, places], hidden.astype(out[0].dtype), mask=real)
        return
    rounded = hidden.astype(jnp.bfloat16).astype(jnp.float32)
    reading.store(row, first, rounded, out, interpreted)
