"""Decodes stored bytes to operands of a TPU's matrix unit, inside a kernel.

Bytes are not widened. Four bytes of a register's lane form a 32-bit word, and a shift and a mask on
the word separate all its nibbles. This takes three operations for eight weights; a conversion to
32-bit integers takes five for one. A nibble in the upper half of its byte is 16 times its value
(`shift`), and the scales divide by 16 again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import BLOCK, PLANE, Int4Weight, Int8Weight, Mxfp4Weight, Quantized
from pallas_kernels.nested import NestedInt8Weight
from pallas_kernels.weights import Rounded

Kind = type[Rounded]

_LOW = 0x0F0F0F0F  # mask of every byte's lower nibble
_TOP = -0x7F7F7F80  # mask of every byte's top bit


def storage(weight: Rounded) -> dict[str, jax.Array]:
    """The arrays that hold the weight's integers, by name: uint8[N, K / 2], or int8[N, K] for 8
    bits in one plane."""
    if isinstance(weight, NestedInt8Weight):
        return {"weights": weight.packed, "rest": weight.rest}
    return {"weights": weight.integers if isinstance(weight, Int8Weight) else weight.packed}


def shift(kind: Kind) -> int:
    """The bits by which `planes` shifts the weight's integers, before their rest, to the left."""
    return 4 if kind in (Int4Weight, NestedInt8Weight) else 0


def planes(refs: Mapping[str, jax.Ref], block: jax.Array | int, kind: Kind) -> list[jax.Array]:
    """The two planes of a block of 256 inputs, k ascending.

    Args:
      refs: references to `storage`.
      block: the number of the block.
      kind: the weight format.

    Returns:
      Two arrays, int8[N, PLANE], shifted left by `shift`, with the rest of a nested weight added.
    """
    if kind is Int8Weight:
        return [_columns(refs["weights"], block * BLOCK + plane) for plane in (0, PLANE)]
    words = _words(refs["weights"], block)
    if kind is Mxfp4Weight:
        halves = [_doubled_e2m1(words & _LOW), _doubled_e2m1(words >> 4 & _LOW)]
    else:
        halves = [words << 4 & ~_LOW, words & ~_LOW]
    if kind is NestedInt8Weight:
        rest = _words(refs["rest"], block)
        halves = [_with_rest(halves[0], rest & _LOW), _with_rest(halves[1], rest >> 4 & _LOW)]
    return [pltpu.bitcast(half, jnp.int8) for half in halves]


def _words(packed: jax.Ref, block: jax.Array | int) -> jax.Array:
    """The bytes of a block: int32[N / 4, PLANE]."""
    return pltpu.bitcast(_columns(packed, block * PLANE), jnp.int32)


def _with_rest(high: jax.Array, rest: jax.Array) -> jax.Array:
    """Adds integers of -8 … 7, given as nibbles, to the multiples of 16 in four bytes of a word.

    A nibble with its top bit flipped is the integer plus 8. The 8 is subtracted from each byte with
    the top bit set, so that no byte borrows from the next.
    """
    bytes_ = high | rest ^ 0x08080808
    return (bytes_ | _TOP) - 0x08080808 ^ ~bytes_ & _TOP


def _columns(weights: jax.Ref, start: jax.Array | int) -> jax.Array:
    """Loads PLANE columns from `start`, a multiple of PLANE."""
    if not isinstance(start, int):
        start = pl.multiple_of(start, PLANE)
    columns: jax.Array = weights[:, pl.ds(start, PLANE)]
    return columns


def _doubled_e2m1(codes: jax.Array) -> jax.Array:
    """Doubles the values of four E2M1 codes, the bytes of a word: i32 -> i32 of four int8.

    The magnitudes 0, 1, 2, 3, 4, 6, 8, 12 are the lower three bits c, plus 0, 1, 2 or 5 for
    c = 4 … 7: c's lower two bits and twice their conjunction. No addition carries into the next
    byte, because exclusive or sets the top bit of a negative byte afterwards.
    """
    magnitude = codes & 0x07070707
    large = codes >> 2 & 0x01010101
    rest = codes & (large | large << 1)
    magnitude += rest + ((rest & rest >> 1) << 1)
    negative = codes >> 3 & 0x01010101
    return ((magnitude ^ (negative << 7) - negative) + negative) ^ negative << 7


def decode_scales(stored: jax.Array, kind: Kind) -> jax.Array:
    """Decodes stored scales to the factors, f32, for sums over `planes`."""
    if kind is not Mxfp4Weight:
        return stored.astype(jnp.float32) * 2.0 ** -shift(kind)
    code = stored.astype(jnp.int32)
    # The bits of 2^(code - 128), see `formats.group_scales`.
    bits = jnp.where(code > 1, code - 1 << 23, 1 << 21 << code)
    return lax.bitcast_convert_type(jnp.where(code == 255, 0x7FC00000, bits), jnp.float32)


def decode_minima(stored: jax.Array, kind: Kind) -> jax.Array:
    """Decodes the values of the smallest integer: bf16 or f32 -> f32."""
    del kind
    return stored.astype(jnp.float32)


def above_smallest(kind: Kind) -> int:
    """The distance from the smallest integer to zero, shifted left by `shift`."""
    return -cast(type[Quantized], kind).smallest << shift(kind)


def decode_zeros(stored: jax.Array, kind: Kind) -> jax.Array:
    """Decodes the integers that stand for zero in `planes`: int8 -> f32."""
    return (stored.astype(jnp.int32) << shift(kind)).astype(jnp.float32)
