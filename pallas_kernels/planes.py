"""Puts the two planes of nested weights together, and takes them apart."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from pallas_kernels.formats import (
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    Quantized,
    int4_from_integers,
    pack,
    unpack,
)
from pallas_kernels.nested import Nested, NestedInt8Weight, NestedWeight
from pallas_kernels.weights import Rounded

# The integers of 8 bits whose rounded sixteenths are -7 … 7.
SMALLEST, LARGEST = -7 * 16 - 8, 7 * 16 + 7


def nested_int8_from_integers(
    q: Int8[Array, "N K"], scales: Float[Array, "N G"], group_size: int | None = 128
) -> NestedInt8Weight:
    """Builds a `NestedInt8Weight` from integers of 8 bits.

    Args:
      q: int8[N, K] in SMALLEST … LARGEST; w = q · scales / 16.
      scales: bf16, f16 or f32[N, ceil(K / group_size)], or [N, 1] where `group_size` is None.
      group_size: inputs per scale: 32, 64, 128, or None for one scale per output channel.

    Raises:
      ValueError: shapes, dtypes or the group size do not match.
    """
    high = (q.astype(jnp.int32) + 8) >> 4
    rest = q.astype(jnp.int32) - 16 * high
    draft = int4_from_integers(high.astype(jnp.int8), scales, group_size)
    return NestedInt8Weight(
        draft.packed, draft.scales, pack(rest.astype(jnp.int8)), q.shape[1], group_size
    )


def draft_plane(weight: Nested) -> Int4Weight | Mxfp4Weight:
    """The 4-bit weight that "a8" and "a4" read: it shares the nested weight's arrays."""
    if isinstance(weight, NestedWeight):
        return weight.draft
    return Int4Weight(
        weight.packed, weight.scales, weight.in_features, weight.group_size,
        out_features=weight.out_features,
    )  # fmt: skip


def joined(weight: NestedInt8Weight) -> Int8Weight:
    """The 8-bit weight that both planes are: row by row, of a weight that is stored so."""
    assert weight.out_features is None
    integers = 16 * unpack(weight.packed) + unpack(weight.rest)
    scales = weight.scales.astype(jnp.float32) / 16
    if weight.scales.dtype != jnp.float16:  # whose smallest values have fewer bits
        scales = scales.astype(weight.scales.dtype)
    return Int8Weight(integers, scales, weight.in_features, weight.group_size)


def in_one_plane(weight: Rounded) -> Quantized:
    """The same weight, stored row by row, in one plane."""
    return joined(weight) if isinstance(weight, NestedInt8Weight) else weight
