"""`matmul` in plain jnp. It defines the result, and every kernel is tested against it.

    a16      y[m, n] = Σ_k x[m, k] · w[n, k]                      in float32
             for bfloat16 x and 8-bit w as below, with qx of 16 bits (`split_activations`)
    a8, a4   y[m, n] = Σ_g sx[m, g] · sw[n, g] · Σ_{k in g} qx[m, k] · (qw[n, k] - zero[n, g])
                       with minima, plus Σ_g sx[m, g] · minimum[n, g] · Σ_{k in g} qx[m, k]
                                                the inner sums exactly, the outer in float32

The result is batch-invariant: float products run on tiles of one shape (`row_tiles`), and integer
sums are exact in any order.

A loop unpacks OUTPUT_CHUNK outputs of a weight at a time, which stay in the cache until they are
multiplied. Without the loop XLA:CPU would unpack all layers before the first one runs, which takes
the memory of a 32-bit model. Each nibble plane is multiplied by its own inputs of x, because
joining the two planes in one matrix costs more than the product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activations import Activation, quantize_activations, split_activations
from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import (
    PLANE,
    Int8Weight,
    Mxfp4Weight,
    Quantized,
    e2m1_integers,
    group_scales,
    nibbles,
    padded_inputs,
    zero_points,
)
from pallas_kernels.interleave import some_rows
from pallas_kernels.nested import NestedInt8Weight
from pallas_kernels.planes import in_one_plane
from pallas_kernels.rounding import rounded_product
from pallas_kernels.row_tiles import map_row_tiles
from pallas_kernels.weight_values import dequantize
from pallas_kernels.weights import Rounded, Weight, check_plain_columns

OUTPUT_CHUNK = 256
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul(x: jax.Array, weight: Weight, activation: Activation = "a16") -> jax.Array:
    """Multiplies x: bf16 or f32[M, K] by weight: (N, K) -> f32[M, N], as defined above."""
    check_plain_columns(weight)
    narrow = x.dtype == jnp.bfloat16
    x = x.astype(jnp.float32)
    if not isinstance(weight, Rounded):
        return _over_output_chunks(lambda part: _dot(x, dequantize(part)), weight)
    x = jnp.pad(x, ((0, 0), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    if activation != "a16":
        q, scales = quantize_activations(x, activation, weight.group_size)
        return _over_output_chunks(lambda part: _integer_matmul(q, scales, part), weight)
    if narrow and isinstance(weight, Int8Weight | NestedInt8Weight):
        high, low, scales = split_activations(x, weight.group_size or PLANE)
        q = jnp.concatenate((high, low))
        return _over_output_chunks(
            lambda part: _integer_matmul(q, scales, _in_groups(in_one_plane(part))), weight
        )
    return _over_output_chunks(lambda part: _float_matmul(x, in_one_plane(part)), weight)


def _in_groups(weight: Quantized) -> Int8Weight:
    """The same weight of 8 bits with a group per PLANE inputs, if it has one scale per channel."""
    assert isinstance(weight, Int8Weight)
    if weight.group_size is not None:
        return weight
    planes = weight.integers.shape[1] // PLANE
    scales, zeros, minima = jax.tree.map(
        lambda part: jnp.repeat(part, planes, axis=1), (weight.scales, weight.zeros, weight.minima)
    )
    return dataclasses.replace(weight, group_size=PLANE, scales=scales, zeros=zeros, minima=minima)


def _over_output_chunks(product: Callable[[Any], jax.Array], weight: Weight) -> jax.Array:
    """Calls `product` on OUTPUT_CHUNK outputs of the weight at a time -> f32[M, N].

    The last chunk overlaps the one before it, because padding would copy the weight. Two or more
    outputs make at least two chunks, because XLA unrolls a loop of one iteration.
    """
    n = weight.shape[0]
    chunk = min(OUTPUT_CHUNK, -(-n // 2))
    chunks = -(-n // chunk)

    def part(start: jax.Array) -> jax.Array:
        if isinstance(weight, Bfloat12Weight):
            return product(some_rows(weight, start + jnp.arange(chunk, dtype=jnp.int32)))

        def rows(leaf: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(leaf, start, chunk)

        return product(jax.tree.map(rows, weight))

    parts = lax.map(part, jnp.minimum(jnp.arange(chunks) * chunk, n - chunk))
    parts = jnp.moveaxis(parts, 0, 1)  # [M, chunks, chunk]
    whole = parts[:, :-1].reshape(parts.shape[0], -1)
    return jnp.concatenate((whole, parts[:, -1, chunks * chunk - n :]), axis=1)


class _Plane(NamedTuple):
    """The part of a weight in the low or in the high nibbles, or a whole `Int8Weight`.

    integers: int8[N, G, inputs per group]; scales: f32[N, G]; zeros: int8[N, G] or None; minima:
    f32[N, G] or None.
    """

    integers: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    minima: jax.Array | None


def _planes(weight: Quantized) -> tuple[_Plane, ...]:
    n = weight.shape[0]
    if isinstance(weight, Int8Weight):
        planes: tuple[jax.Array, ...] = (weight.integers,)
    else:
        planes = nibbles(weight.packed)
    if isinstance(weight, Mxfp4Weight):
        planes = tuple(map(e2m1_integers, planes))

    def of_groups(values: jax.Array | None) -> tuple[Any, ...]:
        if values is None or weight.group_size is None:
            return (values,) * len(planes)
        return _divide(values, len(planes), PLANE // weight.group_size)

    minima = None if isinstance(weight, Mxfp4Weight) else weight.minima
    parts = (
        of_groups(group_scales(weight)),
        of_groups(zero_points(weight)),
        of_groups(None if minima is None else minima.astype(jnp.float32)),
    )
    return tuple(
        _Plane(integers.reshape(n, scales.shape[1], -1), scales, zeros, minima)
        for integers, scales, zeros, minima in zip(planes, *parts, strict=True)
    )


def _divide(values: jax.Array, planes: int, run: int) -> tuple[jax.Array, ...]:
    """Deals runs of `run` consecutive values to the planes: [R, I] -> [R, I / planes] each."""
    runs = values.reshape(values.shape[0], -1, planes, run)
    return tuple(runs[:, :, plane].reshape(values.shape[0], -1) for plane in range(planes))


def _float_matmul(x: jax.Array, weight: Quantized) -> jax.Array:
    """x: f32[M, padded K] -> f32[M, N]."""
    planes = _planes(weight)
    y = jnp.zeros((x.shape[0], weight.shape[0]))
    for part, plane in zip(_divide(x, len(planes), PLANE), planes, strict=True):
        values = plane.integers.astype(jnp.float32)
        if plane.zeros is not None:
            values -= plane.zeros.astype(jnp.float32)[:, :, None]
        values = rounded_product(values, plane.scales[:, :, None])
        if plane.minima is not None:
            values += plane.minima[:, :, None]
        y += _dot(part, values.reshape(values.shape[0], -1))
    return y


def _dot(x: jax.Array, values: jax.Array) -> jax.Array:
    """x: f32[M, K], values: f32[N, K] -> f32[M, N]."""
    return map_row_tiles(
        lambda tile: lax.dot_general(tile, values, _CONTRACT_LAST, precision="highest"), x
    )


def _integer_matmul(q: jax.Array, q_scales: jax.Array, weight: Quantized) -> jax.Array:
    """q: int8[M, padded K], q_scales: f32[M, groups] -> f32[M, N].

    Integers of 16 bits come as int8[2 · M, padded K]: all rows' high bytes, then the low ones.
    Groups are added one after another, because the definition fixes the order of the sum. XLA:CPU
    is also several times slower at a batch of 8-bit products for all groups.
    """
    planes = _planes(weight)
    groups = planes[0].integers.shape[1]
    parts = [part.reshape(part.shape[0], groups, -1) for part in _divide(q, len(planes), PLANE)]
    parts, planes = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (parts, planes))
    if weight.group_size is None:  # one group spans all planes
        parts, planes = jax.tree.map(lambda leaf: leaf[0], (parts, planes))
        total = jnp.sum(jnp.stack([*map(_group_sum, parts, planes)]), axis=0)
        y = rounded_product(total.astype(jnp.float32), q_scales * planes[0].scales)
        if planes[0].minima is None:
            return y
        inputs = _input_sums(q)[:, None].astype(jnp.float32)
        return y + rounded_product(inputs * q_scales, planes[0].minima)
    scales = [part.T for part in _divide(q_scales, len(planes), PLANE // weight.group_size)]
    m = q_scales.shape[0]

    def joined(sums: jax.Array) -> jax.Array:
        return sums if sums.shape[0] == m else 256 * sums[:m] + sums[m:]

    def add(y: jax.Array, group: Any) -> tuple[jax.Array, None]:
        for part, scale, plane in zip(*group, strict=True):
            total = joined(_group_sum(part, plane)).astype(jnp.float32)
            y += total * (scale[:, None] * plane.scales)
            if plane.minima is not None:
                inputs = joined(_input_sums(part)).astype(jnp.float32)
                y += (inputs * scale)[:, None] * plane.minima
        return y, None

    y, _ = lax.scan(add, jnp.zeros((m, weight.shape[0])), (parts, scales, planes))
    return y


def _group_sum(q: jax.Array, group: _Plane) -> jax.Array:
    """Σ q · (integer - zero) over a group: int8[M, inputs], [N, inputs] -> i32[M, N]."""
    total = lax.dot_general(q, group.integers, _CONTRACT_LAST, preferred_element_type=jnp.int32)
    if group.zeros is None:
        return total
    return total - _input_sums(q)[:, None] * group.zeros.astype(jnp.int32)


def _input_sums(q: jax.Array) -> jax.Array:
    """Σ q over the inputs: int8[M, inputs] -> i32[M]."""
    return jnp.sum(q, axis=1, dtype=jnp.int32)
