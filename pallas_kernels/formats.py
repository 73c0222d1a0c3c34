"""The weight formats, as pytrees: what the bytes mean, and nothing about how they are multiplied.

One storage serves every kernel: `packed` holds two 4-bit integers per byte in blocks of 256 along
the input dimension; byte r of a block holds the weight k = r in its low nibble and k = r + 128 in
its high one. So one nibble plane is 128 consecutive inputs, the default group, and unpacking needs
no interleave on any machine. Nibbles are two's complement.

Left out on purpose: quantization recipes (`checkpoints_tools.quantize`) and arithmetic
(`pallas_kernels.matmul`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

PLANE = 128  # inputs per nibble plane
BLOCK = 2 * PLANE  # inputs per packed block
GROUP_SIZES = (32, 64, 128, None)
SCALE_DTYPES = ("bfloat16", "float16", "float32")


def padded_inputs(k: int) -> int:
    """Inputs after padding to whole blocks; the padding holds zeros."""
    return -(-k // BLOCK) * BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """A symmetric 4-bit matrix: w[n, k] = q[n, k] · scales[n, k // group_size], q in -8 … 7.

    packed: uint8[N, ceil(K / 256) · 128], two weights per byte (layout above).
    scales: bf16, f16 or f32[N, groups], where groups covers the padded inputs, or [N, 1] where
        `group_size` is None (one scale per output channel). Scales of padding are zero.
    in_features: K, before padding.
    group_size: inputs per scale: 32, 64, 128 or None.
    """

    packed: jax.Array
    scales: jax.Array
    in_features: int = dataclasses.field(metadata={"static": True})
    group_size: int | None = dataclasses.field(default=128, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.packed.shape[0], self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights and their scales."""
        return self.packed.nbytes + self.scales.nbytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bfloat16Weight:
    """A bfloat16 matrix, held as its bits: XLA:CPU would keep a float32 copy of a bfloat16 array.

    bits: uint16[N, K].
    """

    bits: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.bits.shape[0], self.bits.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.bits.nbytes


Weight = jax.Array | Bfloat16Weight | Int4Weight


def plain_weight(values: jax.Array) -> jax.Array | Bfloat16Weight:
    """An unquantized matrix in the form that kernels read. bf16 or f32[N, K]."""
    if values.dtype != jnp.bfloat16:
        return values
    return Bfloat16Weight(jax.lax.bitcast_convert_type(values, jnp.uint16))


def plain_values(weight: jax.Array | Bfloat16Weight) -> jax.Array:
    """The inverse of `plain_weight`."""
    if isinstance(weight, Bfloat16Weight):
        return jax.lax.bitcast_convert_type(weight.bits, jnp.bfloat16)
    return weight


def take_rows(weight: jax.Array | Bfloat16Weight, indices: jax.Array) -> jax.Array:
    """Rows of an unquantized matrix, such as the embeddings of tokens. [...] -> [..., K]."""
    if isinstance(weight, Bfloat16Weight):
        return plain_values(Bfloat16Weight(weight.bits[indices]))
    return weight[indices]


def check_group_size(group_size: int | None) -> None:
    """Raises ValueError unless `group_size` is one that the kernels read."""
    if group_size not in GROUP_SIZES:
        raise ValueError(
            f"group_size must be 32, 64, 128 or None (one scale per output channel), "
            f"got {group_size!r}"
        )


def pack(q: jax.Array) -> jax.Array:
    """Packs integers in -8 … 7. q: int8[N, K] -> uint8[N, ceil(K / 256) · 128]."""
    n, k = q.shape
    q = jnp.pad(q, ((0, 0), (0, padded_inputs(k) - k)))
    planes = jax.lax.bitcast_convert_type(q, jnp.uint8).reshape(n, -1, 2, PLANE) & 0xF
    return (planes[:, :, 0] | planes[:, :, 1] << 4).reshape(n, -1)


def unpack(packed: jax.Array) -> jax.Array:
    """The inverse of `pack`, padding included. uint8[N, P] -> int8[N, 2 · P]."""
    n = packed.shape[0]
    signed = jax.lax.bitcast_convert_type(packed, jnp.int8).reshape(n, -1, PLANE)
    return jnp.stack((signed << 4 >> 4, signed >> 4), axis=2).reshape(n, -1)


def int4_from_integers(q: jax.Array, scales: jax.Array, group_size: int | None = 128) -> Int4Weight:
    """Builds an `Int4Weight` from q: int8[N, K] in -8 … 7 and scales[N, ceil(K / group_size)].

    Raises ValueError where shapes, dtypes or the group size do not fit together.
    """
    check_group_size(group_size)
    n, k = q.shape
    groups = 1 if group_size is None else -(-k // group_size)
    if scales.shape != (n, groups):
        raise ValueError(f"scales must have shape {(n, groups)}, got {scales.shape}")
    if scales.dtype.name not in SCALE_DTYPES:
        raise ValueError(f"scales must be {' or '.join(SCALE_DTYPES)}, got {scales.dtype.name}")
    if group_size is not None:
        scales = jnp.pad(scales, ((0, 0), (0, padded_inputs(k) // group_size - groups)))
    return Int4Weight(pack(q), scales, k, group_size)


def dequantize(weight: Weight) -> jax.Array:
    """The values a weight stands for, f32[N, K]; exact for 16-bit scales."""
    if not isinstance(weight, Int4Weight):
        return plain_values(weight).astype(jnp.float32)
    n, k = weight.shape
    q = unpack(weight.packed).astype(jnp.float32)
    groups = q.reshape(n, weight.scales.shape[1], -1)
    return (groups * weight.scales.astype(jnp.float32)[:, :, None]).reshape(n, -1)[:, :k]
