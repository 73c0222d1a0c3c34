"""The weight formats as pytrees, built from integers or codes.

All kernels share one storage. `packed` holds two 4-bit integers per byte in blocks of 256 along the
input dimension. Byte r of a block holds weight k = r in its low nibble and k = r + 128 in its high
nibble. A nibble plane is therefore 128 consecutive inputs, the default group, and unpacking never
interleaves. Integers are two's complement, floats are E2M1.

The columns of a weight may be stored in another order than the model's inputs, so that the inputs
of a group are consecutive (GPTQ's act-order, Atom's reordering). Groups, scales, zeros and minima
follow the stored order.

For CPUs the rows of a weight's arrays can be interleaved (`pallas_kernels.interleave`). The shapes
below are those of a weight stored row by row.

Other formats have modules of their own: a bfloat16 matrix in 12 bits a weight (`bfloat12`), and
matrices in two planes (`nested`); `weights` names them all. Other modules hold the values of
weights (`weight_values`), quantization methods (`checkpoints_tools.quantization`) and arithmetic
(`matmul`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32, UInt8

from pallas_kernels.arrays import Arrays
from pallas_kernels.settings import own_settings

PLANE = 128  # inputs per nibble plane
BLOCK = 2 * PLANE  # inputs per packed block
GROUP_SIZES = (32, 64, 128, None)
MXFP4_GROUP = 32
E8M0_ONE = 127
SCALE_DTYPES = ("bfloat16", "float16", "float32")


def padded_inputs(k: int) -> int:
    """The number of inputs after padding with zeros to whole blocks."""
    return -(-k // BLOCK) * BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight(Arrays):
    """An 8-bit matrix, g = k // group_size:

        w[n, k] = (q[n, k] - zeros[n, g]) · scales[n, g]
        w[n, k] = (q[n, k] + 128) · scales[n, g] + minima[n, g]      where there are minima

    integers: int8[N, padded K] (`padded_inputs`).
    scales: bf16, f16 or f32[N, groups], where groups covers the padded inputs, or [N, 1] where
        `group_size` is None (one scale per output channel). Scales of padding are zero.
    in_features: K, before padding.
    group_size: inputs per scale: 32, 64, 128 or None.
    zeros: int8[N, groups], the integers that stand for zero; None for a symmetric weight.
    order: int32[K], a permutation: stored column k multiplies input order[k]. None for the inputs'
        own order.
    out_features: N if the rows are interleaved, else None.
    minima: the values of the smallest integer, in the scales' shape and dtype, or None. Minima of
        padding are zero. A weight with minima has no zeros.
    """

    integers: jax.Array
    scales: jax.Array
    in_features: int = jax.tree.static()
    group_size: int | None = jax.tree.static(default=None)
    zeros: jax.Array | None = None
    order: jax.Array | None = None
    out_features: int | None = jax.tree.static(default=None)
    minima: jax.Array | None = None
    smallest: ClassVar[int] = -128  # of the integers

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.out_features or self.integers.shape[0], self.in_features


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outliers:
    """Input columns that are kept at 8 bits (Atom's mixed precision, QSpec section 4.1).

    columns: int32[O], distinct indices of the model's inputs, independent of `order`. Their 4-bit
        entries stand for zero.
    weight: (N, O). Its inputs take 8-bit activations where the others take 8 or 4 bits.
    """

    columns: jax.Array
    weight: Int8Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight(Arrays):
    """A 4-bit matrix, g = k // group_size:

        w[n, k] = (q[n, k] - zeros[n, g]) · scales[n, g]
        w[n, k] = (q[n, k] + 8) · scales[n, g] + minima[n, g]        where there are minima

    packed: uint8[N, ceil(K / 256) · 128], two weights per byte (layout above), q in -8 … 7.
    scales: bf16, f16 or f32[N, groups], where groups covers the padded inputs, or [N, 1] where
        `group_size` is None (one scale per output channel). Scales of padding are zero.
    in_features: K, before padding.
    group_size: inputs per scale: 32, 64, 128 or None.
    zeros: int8[N, groups], the integers that stand for zero; None for a symmetric weight.
    outliers: input columns held at 8 bits instead, or None.
    order: int32[K], a permutation: stored column k multiplies input order[k]. None for the inputs'
        own order.
    activation_clip: the share of a group's largest activation that "a4" represents; larger ones are
        clipped (Atom, section 4.2).
    out_features: N if the rows are interleaved, else None.
    minima: the values of the smallest integer, in the scales' shape and dtype, or None. Minima of
        padding are zero. A weight with minima has neither zeros nor outliers.
    """

    packed: jax.Array
    scales: jax.Array
    in_features: int = jax.tree.static()
    group_size: int | None = jax.tree.static(default=128)
    zeros: jax.Array | None = None
    outliers: Outliers | None = None
    order: jax.Array | None = None
    activation_clip: float = jax.tree.static(default=1.0)
    out_features: int | None = jax.tree.static(default=None)
    minima: jax.Array | None = None
    smallest: ClassVar[int] = -8  # of the integers

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.out_features or self.packed.shape[0], self.in_features


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mxfp4Weight(Arrays):
    """An MXFP4 matrix (OCP Microscaling): w[n, k] = e2m1(code[n, k]) · 2^(scales[n, g] - 127),
    g = k // 32.

    packed: uint8[N, ceil(K / 256) · 128], two codes per byte (layout above).
    scales: uint8[N, groups], E8M0; 255 stands for NaN. Scales of padding are 1.
    in_features: K, before padding.
    out_features: N if the rows are interleaved, else None.
    """

    packed: jax.Array
    scales: jax.Array
    in_features: int = jax.tree.static()
    out_features: int | None = jax.tree.static(default=None)
    smallest: ClassVar[int] = -12  # of the integers, which are twice the E2M1 values

    @property
    def group_size(self) -> int:
        """Inputs per scale."""
        return MXFP4_GROUP

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.out_features or self.packed.shape[0], self.in_features


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bfloat16Weight(Arrays):
    """A bfloat16 matrix, stored as its bits.

    XLA:CPU would keep a float32 copy of a bfloat16 array.

    bits: uint16[N, K].
    out_features: N if the rows are interleaved, else None.
    """

    bits: jax.Array
    out_features: int | None = jax.tree.static(default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        n, k = self.bits.shape[:2]
        return (n, k) if self.out_features is None else (self.out_features, 2 * k)


Quantized = Int4Weight | Mxfp4Weight | Int8Weight


def plain_weight(
    values: Float[Array, "*L N K"],
) -> Float[Array, "*L N K"] | Bfloat16Weight:
    """Converts an unquantized matrix to the form that kernels read.

    Args:
      values: bf16 or f32[N, K].

    Returns:
      A `Bfloat16Weight` for bfloat16; the array itself for float32.
    """
    if values.dtype != jnp.bfloat16:
        return values
    return Bfloat16Weight(jax.lax.bitcast_convert_type(values, jnp.uint16))


def check_group_size(group_size: int | None) -> None:
    """Raises ValueError unless `group_size` is one of GROUP_SIZES."""
    if group_size not in GROUP_SIZES:
        raise ValueError(
            f"group_size must be 32, 64, 128 or None (one scale per output channel), "
            f"got {group_size!r}"
        )


@jax.jit
@own_settings()
def pack(q: Int8[Array, "N K"]) -> UInt8[Array, " N -(-K//256)*128"]:
    """Packs integers in -8 … 7: int8[N, K] -> uint8[N, ceil(K / 256) · 128]."""
    n, k = q.shape
    q = jnp.pad(q, ((0, 0), (0, padded_inputs(k) - k)))
    planes = jax.lax.bitcast_convert_type(q, jnp.uint8).reshape(n, -1, 2, PLANE) & 0xF
    return (planes[:, :, 0] | planes[:, :, 1] << 4).reshape(n, -1)


def nibbles(packed: UInt8[Array, "N P"]) -> tuple[Int8[Array, "N P"], Int8[Array, "N P"]]:
    """The integers of the low and of the high nibbles: uint8[N, P] -> int8[N, P] twice."""
    signed = jax.lax.bitcast_convert_type(packed, jnp.int8)
    return signed << 4 >> 4, signed >> 4


def unpack(packed: UInt8[Array, "N P"]) -> Int8[Array, "N 2*P"]:
    """Inverts `pack`, but keeps the padding: uint8[N, P] -> int8[N, 2 · P]."""
    n = packed.shape[0]
    planes = (plane.reshape(n, -1, PLANE) for plane in nibbles(packed))
    return jnp.stack(tuple(planes), axis=2).reshape(n, -1)


def int4_from_integers(
    q: Int8[Array, "N K"],
    scales: Float[Array, "N G"],
    group_size: int | None = 128,
    zeros: Int8[Array, "N G"] | None = None,
    order: Int32[Array, " K"] | None = None,
    minima: Float[Array, "N G"] | None = None,
) -> Int4Weight:
    """Builds an `Int4Weight` from integers and their groups' scales and zeros or minima.

    Args:
      q: int8[N, K] in -8 … 7.
      scales: bf16, f16 or f32[N, ceil(K / group_size)], or [N, 1] where `group_size` is None.
      group_size: inputs per scale: 32, 64, 128, or None for one scale per output channel.
      zeros: int8 of the scales' shape; None for a symmetric weight.
      order: int32[K], the input of every column of q; None for the inputs' own order.
      minima: the values of the integer -8, in the scales' shape and dtype, or None.

    Raises:
      ValueError: shapes, dtypes or the group size do not match, or both zeros and minima are given.
    """
    k = q.shape[1]
    scales, zeros, minima = _padded_parts(q.shape, group_size, scales, zeros, minima)
    _check_order(order, k)
    return Int4Weight(pack(q), scales, k, group_size, zeros, order=order, minima=minima)


def int8_from_integers(
    q: Int8[Array, "N K"],
    scales: Float[Array, "N G"],
    group_size: int | None = None,
    zeros: Int8[Array, "N G"] | None = None,
    order: Int32[Array, " K"] | None = None,
    minima: Float[Array, "N G"] | None = None,
) -> Int8Weight:
    """Builds an `Int8Weight` from integers and their groups' scales and zeros or minima.

    Args:
      q: int8[N, K].
      scales: as in `int4_from_integers`.
      group_size: as in `int4_from_integers`.
      zeros: as in `int4_from_integers`.
      order: as in `int4_from_integers`.
      minima: the values of the integer -128, in the scales' shape and dtype, or None.

    Raises:
      ValueError: as in `int4_from_integers`.
    """
    k = q.shape[1]
    scales, zeros, minima = _padded_parts(q.shape, group_size, scales, zeros, minima)
    _check_order(order, k)
    q = jnp.pad(q, ((0, 0), (0, padded_inputs(k) - k)))
    return Int8Weight(q, scales, k, group_size, zeros, order, minima=minima)


def mxfp4_from_codes(codes: UInt8[Array, "N K"], scales: UInt8[Array, "N G"]) -> Mxfp4Weight:
    """Builds an `Mxfp4Weight` from E2M1 codes and E8M0 scales.

    Args:
      codes: uint8[N, K] in 0 … 15.
      scales: uint8[N, ceil(K / 32)].

    Raises:
      ValueError: shapes or dtypes do not match.
    """
    scales = _padded_groups("scales", scales, codes.shape, MXFP4_GROUP, ("uint8",), E8M0_ONE)
    return Mxfp4Weight(pack(codes.astype(jnp.int8)), scales, codes.shape[1])


def _padded_parts(
    shape: tuple[int, ...],
    group_size: int | None,
    scales: jax.Array,
    zeros: jax.Array | None,
    minima: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Checks and pads scales, zeros and minima."""
    check_one_offset(zeros, minima)
    scales = _padded_groups("scales", scales, shape, group_size, SCALE_DTYPES)
    if zeros is not None:
        zeros = _padded_groups("zeros", zeros, shape, group_size, ("int8",))
    if minima is not None:
        minima = _padded_groups("minima", minima, shape, group_size, (scales.dtype.name,))
    return scales, zeros, minima


def check_one_offset(zeros: object, minima: object) -> None:
    """Raises ValueError if a weight has both zeros and minima."""
    if zeros is not None and minima is not None:
        raise ValueError("a weight must have zeros or minima, got both")


def _check_order(order: jax.Array | None, k: int) -> None:
    if order is not None and (order.shape != (k,) or order.dtype != jnp.int32):
        raise ValueError(f"order must be int32[{k}], got {order.dtype.name}{list(order.shape)}")


def _padded_groups(
    name: str,
    values: jax.Array,
    shape: tuple[int, ...],
    group_size: int | None,
    dtypes: tuple[str, ...],
    padding: int = 0,
) -> jax.Array:
    """Checks the groups' values of a matrix of `shape`, and adds those of its padding."""
    check_group_size(group_size)
    n, k = shape
    groups = 1 if group_size is None else -(-k // group_size)
    if values.shape != (n, groups):
        raise ValueError(f"{name} must have shape {(n, groups)}, got {values.shape}")
    if values.dtype.name not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(dtypes)}, got {values.dtype.name}")
    if group_size is None:
        return values
    missing = padded_inputs(k) // group_size - groups
    if not missing:
        return values
    return jnp.pad(values, ((0, 0), (0, missing)), constant_values=padding)


def integers(weight: Quantized) -> Int8[Array, "N padded"]:
    """The integers of a weight: int8[N, padded K]. For MXFP4 they are twice the E2M1 values."""
    if isinstance(weight, Int8Weight):
        return weight.integers
    q = unpack(weight.packed)
    return q if isinstance(weight, Int4Weight) else e2m1_integers(q)


def e2m1_integers(codes: Int8[Array, "*shape"]) -> Int8[Array, "*shape"]:
    """Doubles the values of E2M1 codes that `nibbles` has sign-extended: int8 -> int8."""
    code = codes & 7  # 0 … 7 become 0, 1, 2, 3, 4, 6, 8, 12
    magnitude = jnp.where(code < 2, code, (2 | (code & 1)) << jnp.maximum((code >> 1) - 1, 0))
    return jnp.where(codes < 0, -magnitude, magnitude).astype(jnp.int8)


def zero_points(weight: Quantized) -> Int8[Array, "N G"] | None:
    """The integers that the values are relative to: int8[N, groups]; None for zero."""
    if isinstance(weight, Mxfp4Weight):
        return None
    if weight.minima is None:
        return weight.zeros
    return jnp.full(weight.minima.shape, weight.smallest, jnp.int8)


def group_scales(weight: Quantized) -> Float32[Array, "N G"]:
    """The scales of the groups' `integers`: f32[N, groups]."""
    if not isinstance(weight, Mxfp4Weight):
        return weight.scales.astype(jnp.float32)
    code = weight.scales.astype(jnp.uint32)
    # The bits of 2^(code - 128): half the E8M0 value, because the integers are doubled. The two
    # smallest are subnormal.
    bits = jnp.where(code > 1, (code - 1) << 23, jnp.uint32(1 << 21) << code)
    return jax.lax.bitcast_convert_type(jnp.where(code == 255, 0x7FC00000, bits), jnp.float32)
