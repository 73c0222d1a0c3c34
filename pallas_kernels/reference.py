"""The meaning of `matmul`, in plain jnp: what every kernel is tested against.

    a16      y[m, n] = Σ_k x[m, k] · w[n, k]                      in float32
    a8, a4   y[m, n] = Σ_g sx[m, g] · sw[n, g] · Σ_{k in g} qx[m, k] · (qw[n, k] - zero[n, g])
                                                the inner sum exactly, the outer in float32

It is batch-invariant by construction: every product runs on tiles of ROW_TILE rows, so XLA
compiles one shape, and with it one order of summation, however many rows there are. (Given M rows,
XLA:CPU would choose another algorithm for M = 1 than for M = 2.) Integer sums need no such care:
products of small integers are exact in float32 up to 2^24, in any order.

Weights are unpacked OUTPUT_CHUNK outputs at a time, in a loop. Without it XLA:CPU unpacks all
layers before the first one runs, which takes the memory of a 32-bit model and several times as
long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activations import quantize_activations
from pallas_kernels.formats import (
    PLANE,
    Int4Weight,
    Quantized,
    Weight,
    dequantize,
    group_scales,
    integers,
    padded_inputs,
)

ROW_TILE = 8
OUTPUT_CHUNK = 256
_CONTRACT_LAST = (((1,), (1,)), ((), ()))
_CONTRACT_LAST_PER_CHUNK = (((2,), (2,)), ((1,), (1,)))


def matmul(x: jax.Array, weight: Weight, activation: str = "a16") -> jax.Array:
    """x: bf16 or f32[M, K] times weight: [N, K] -> f32[M, N]. See the module's equations."""
    x = x.astype(jnp.float32)
    if activation == "a16":
        return _over_output_chunks(lambda part: _float_matmul(x, part), weight)
    assert isinstance(weight, Quantized)
    x = jnp.pad(x, ((0, 0), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    q, scales = quantize_activations(x, activation, weight.group_size)
    return _over_output_chunks(lambda part: _integer_matmul(q, scales, part), weight)


def _over_output_chunks(product: Callable[[Any], jax.Array], weight: Weight) -> jax.Array:
    """`product` with OUTPUT_CHUNK outputs of the weight at a time, side by side: f32[M, N].

    The last chunk overlaps the one before it, because padding would copy the weight. There are at
    least two chunks where there are two outputs: XLA takes a loop of one iteration apart.
    """
    n = weight.shape[0]
    chunk = min(OUTPUT_CHUNK, -(-n // 2))
    chunks = -(-n // chunk)

    def part(start: jax.Array) -> jax.Array:
        def rows(leaf: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(leaf, start, chunk)

        return product(jax.tree.map(rows, weight))

    parts = lax.map(part, jnp.minimum(jnp.arange(chunks) * chunk, n - chunk))
    parts = jnp.moveaxis(parts, 0, 1)  # [M, chunks, chunk]
    whole = parts[:, :-1].reshape(parts.shape[0], -1)
    return jnp.concatenate((whole, parts[:, -1, chunks * chunk - n :]), axis=1)


def map_row_tiles(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies `function` to tiles of exactly ROW_TILE rows. x: [M, ...] -> [M, ...].

    The rows are padded with zeros. On the CPU the tiles run one after another, so that every call
    has the same shape; elsewhere they run side by side.
    """
    m = x.shape[0]
    tiles = -(-m // ROW_TILE)
    x = jnp.pad(x, ((0, tiles * ROW_TILE - m), *((0, 0) for _ in x.shape[1:])))
    x = x.reshape(tiles, ROW_TILE, *x.shape[1:])
    y = over_tiles(function, x)
    return y.reshape(tiles * ROW_TILE, *y.shape[2:])[:m]


def over_tiles(function: Callable, tiles: object) -> jax.Array:
    """`function` over the leading axis: a loop on the CPU, one batched call elsewhere."""
    return lax.platform_dependent(
        tiles, cpu=lambda xs: lax.map(function, xs), default=jax.vmap(function)
    )


def _float_matmul(x: jax.Array, weight: Weight) -> jax.Array:
    """x: f32[M, K] -> f32[M, N]."""
    values = dequantize(weight)
    return map_row_tiles(
        lambda tile: lax.dot_general(tile, values, _CONTRACT_LAST, precision="highest"), x
    )


def _integer_matmul(q: jax.Array, q_scales: jax.Array, weight: Quantized) -> jax.Array:
    """q: int8[M, padded K], q_scales: f32[M, groups] -> f32[M, N]."""
    scales = group_scales(weight)
    n, padded = scales.shape[0], q.shape[1]
    chunk = min(weight.group_size or PLANE, PLANE)
    chunks = q.astype(jnp.float32).reshape(-1, padded // chunk, chunk)
    values = integers(weight).astype(jnp.float32).reshape(n, -1, chunk)
    products = map_row_tiles(
        lambda tile: jnp.moveaxis(
            lax.dot_general(tile, values, _CONTRACT_LAST_PER_CHUNK, precision="highest"), 0, 1
        ),
        chunks,
    )  # f32[M, chunks, N], integers of at most 128 · 128 · 128 < 2^24
    sums = jnp.sum(chunks, axis=-1)
    if weight.group_size is None:
        products = jnp.sum(products.astype(jnp.int32), axis=1, keepdims=True)
        sums = jnp.sum(sums.astype(jnp.int32), axis=1, keepdims=True)
    zeros = weight.zeros if isinstance(weight, Int4Weight) else None
    y = jnp.zeros((q.shape[0], n), jnp.float32)
    for group in range(products.shape[1]):  # unrolled: the order of the sum is part of the meaning
        product = products[:, group]
        if zeros is not None:
            product -= sums[:, group, None] * zeros[:, group].astype(sums.dtype)
        y += product.astype(jnp.float32) * (q_scales[:, group, None] * scales[:, group])
    return y
