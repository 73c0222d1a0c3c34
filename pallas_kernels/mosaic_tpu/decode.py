"""From stored bytes to what a TPU's matrix unit multiplies, inside a kernel.

A byte of two nibbles is never widened: four bytes of a register's lane are one 32-bit word, and the
nibbles of all four are parted by a shift and a mask on the word. That is three operations for eight
weights, where a conversion to 32-bit integers takes five for one. Hence `shift`: a nibble in the
upper half of its byte is an int8 of 16 times its value, and the scales take the 16 back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import BLOCK, PLANE, Int4Weight, Int8Weight, Mxfp4Weight, Quantized

_LOW = 0x0F0F0F0F  # the lower nibble of every byte


def storage(weight: Quantized) -> jax.Array:
    """The array that holds the weight's integers: uint8[N, K / 2], or int8[N, K] for 8 bits."""
    return weight.integers if isinstance(weight, Int8Weight) else weight.packed


def shift(kind: type[Quantized]) -> int:
    """How far to the left `planes` returns the weight's integers."""
    return 4 if kind is Int4Weight else 0


def planes(weights: jax.Ref, block: jax.Array | int, kind: type[Quantized]) -> list[jax.Array]:
    """The two planes of one block of inputs, k ascending: int8[N, PLANE] each, by `shift`.

    weights: a reference to uint8[N, K / 2] or int8[N, K]; block: its number, 256 inputs each.
    """
    if kind is Int8Weight:
        return [_columns(weights, block * BLOCK + plane) for plane in (0, PLANE)]
    words = pltpu.bitcast(_columns(weights, block * PLANE), jnp.int32)  # [N / 4, PLANE]
    if kind is Mxfp4Weight:
        halves = [_doubled_e2m1(words & _LOW), _doubled_e2m1(words >> 4 & _LOW)]
    else:
        halves = [words << 4 & ~_LOW, words & ~_LOW]
    return [pltpu.bitcast(half, jnp.int8) for half in halves]


def _columns(weights: jax.Ref, start: jax.Array | int) -> jax.Array:
    """PLANE columns, from a multiple of PLANE on."""
    if not isinstance(start, int):
        start = pl.multiple_of(start, PLANE)
    columns: jax.Array = weights[:, pl.ds(start, PLANE)]
    return columns


def _doubled_e2m1(codes: jax.Array) -> jax.Array:
    """Twice the values of four E2M1 codes in the bytes of a word, as int8. i32 -> i32.

    The magnitudes 0, 1, 2, 3, 4, 6, 8, 12 are the code's lower three bits c plus 0, 1, 2 or 5 for
    c = 4 … 7, that is plus c's lower two bits and twice their conjunction. No sum of bytes carries
    into the next byte: the top bit of a negative byte is set by exclusive or, after the addition.
    """
    magnitude = codes & 0x07070707
    large = codes >> 2 & 0x01010101
    rest = codes & (large | large << 1)
    magnitude += rest + ((rest & rest >> 1) << 1)
    negative = codes >> 3 & 0x01010101
    return ((magnitude ^ (negative << 7) - negative) + negative) ^ negative << 7


def decode_scales(stored: jax.Array, kind: type[Quantized]) -> jax.Array:
    """The factors, f32, on the sums over a group's `planes`, from the stored scales."""
    if kind is not Mxfp4Weight:
        return stored.astype(jnp.float32) * 2.0 ** -shift(kind)
    code = stored.astype(jnp.int32)
    # Half of 2^(code - 127), by its bits (`formats.group_scales`).
    bits = jnp.where(code > 1, code - 1 << 23, 1 << 21 << code)
    return lax.bitcast_convert_type(jnp.where(code == 255, 0x7FC00000, bits), jnp.float32)


def decode_minima(stored: jax.Array, kind: type[Quantized]) -> jax.Array:
    """The values of the smallest integer: bf16 or f32 -> f32."""
    del kind
    return stored.astype(jnp.float32)


def above_smallest(kind: type[Quantized]) -> int:
    """How far the integer zero lies above the smallest integer, by `shift`."""
    return -kind.smallest << shift(kind)


def decode_zeros(stored: jax.Array, kind: type[Quantized]) -> jax.Array:
    """The integer that stands for zero in a group's `planes`: int8 -> f32."""
    return (stored.astype(jnp.int32) << shift(kind)).astype(jnp.float32)
