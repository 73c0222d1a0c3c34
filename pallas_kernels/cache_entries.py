"""Keys or values of every cache slot, with 16 or 32 bits or quantized to 8 or 4.

Quantized entries have one scale and one zero per slot and head (Atom section 4.4; QuaRot's groups
if they are as wide as a head). Both are computed from the entry itself, so an entry depends only on
its token, and all readers see the same values.

Keys are quantized after RoPE, so attention reads them as they are. Atom quantizes them before,
because RoPE mixes large features with small ones, and must rotate them at every read. QuaRot's
rotation of the keys evens out such features at every write.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt16

CACHE_BITS = (16, 8, 4)


def check_cache_bits(bits: int) -> None:
    """Raises ValueError unless `bits` is 16, 8 or 4."""
    if type(bits) is not int or bits not in CACHE_BITS:
        raise ValueError(f"cache_bits must be one of {CACHE_BITS}, got {bits!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedEntries:
    """x[b, l, s, k, e] = (code[b, l, s, k, e] - zeros[b, l, s, k]) · scales[b, l, s, k].

    codes: uint8[B, L, S, K, E]. With 4 bits, uint8[B, L, S, K, E / 2]: the low nibbles hold the
        first half of a head's features, the high nibbles the second half.
    scales: f32[B, L, S, K].
    zeros: uint8[B, L, S, K], the codes that stand for zero.
    bits: 8 or 4.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array
    bits: int = jax.tree.static()

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, L, S, K, E)."""
        return *self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits


Entries = jax.Array | QuantizedEntries  # float32, or uint16 holding bfloat16 bits
# They belong to all layers and R rows. A pass over B rows uses those of the first B.
Unquantized = Float32[Array, "R L S K E"] | UInt16[Array, "R L S K E"]
Cached = Unquantized | QuantizedEntries
Place = tuple[Int32[Array, ""] | int, Int32[Array, ""] | int]  # a row and a layer


def empty_entries(shape: tuple[int, ...], dtype: str, bits: int) -> Entries:
    """Slots that hold zeros.

    Args:
      shape: (B, L, S, K, E).
      dtype: the type of unquantized entries, "bfloat16" or "float32".
      bits: 8 or 4, or 16 for unquantized entries.
    """
    if bits == 16:
        return jnp.zeros(shape, jnp.uint16 if dtype == "bfloat16" else jnp.float32)
    *slots, e = shape
    codes = jnp.zeros((*slots, e * bits // 8), jnp.uint8)
    return QuantizedEntries(codes, jnp.zeros(slots), jnp.zeros(slots, jnp.uint8), bits)


def write_entries(
    entries: Cached,
    rows: Int32[Array, "B 1"],
    layer: Int32[Array, ""] | int,
    slots: Int32[Array, "B T"],
    new: Float[Array, "B T K E"],
) -> Cached:
    """Writes new: bf16 or f32[B, T, K, E] at [rows, layer, slots]. Drops slots past the last."""
    if isinstance(entries, QuantizedEntries):
        parts: Entries = quantize_entries(new, entries.bits)
    elif entries.dtype == jnp.uint16:
        parts = lax.bitcast_convert_type(new, jnp.uint16)
    else:
        parts = new

    def put(old: jax.Array, part: jax.Array) -> jax.Array:
        return old.at[rows, layer, slots].set(part, mode="drop", unique_indices=True)

    written: Entries = jax.tree.map(put, entries, parts)
    return written


def write_after(
    cached: tuple[Cached, Cached],
    lengths: Int32[Array, " B"],
    layer: Int32[Array, ""] | int,
    new: tuple[Float[Array, "B T K E"], Float[Array, "B T K E"]],
) -> tuple[Cached, Cached]:
    """Writes T new keys and values per row to the slots lengths … lengths + T - 1.

    Args:
      cached: keys and values of all layers.
      lengths: int32[B].
      layer: int32[].
      new: bf16 or f32[B, T, K, E] each. Those past the capacity are dropped.
    """
    b, t = new[0].shape[:2]
    place = jnp.arange(b)[:, None], layer, lengths[:, None] + jnp.arange(t)
    return write_entries(cached[0], *place, new[0]), write_entries(cached[1], *place, new[1])


def read_block(
    entries: Cached, place: Place, start: Int32[Array, ""] | int, size: int
) -> Float32[Array, "{size} K E"]:
    """Reads slots start … start + size - 1 of one row and layer: f32[size, K, E]."""

    def cut(part: jax.Array) -> jax.Array:
        others = part.shape[3:]
        begin = (*place, start) + (0,) * len(others)
        return lax.dynamic_slice(part, begin, (1, 1, size, *others))[0, 0]

    return _values(jax.tree.map(cut, entries))


def read_slots(entries: Cached, place: Place, slots: Int32[Array, " N"]) -> Float32[Array, "N K E"]:
    """Reads the given slots of one row and layer: int32[N] -> f32[N, K, E]."""
    return _values(jax.tree.map(lambda part: part[*place, slots], entries))


def move_entries(
    entries: Cached,
    rows: Int32[Array, "B 1"],
    sources: Int32[Array, "B N"],
    targets: Int32[Array, "B N"],
) -> Cached:
    """Copies [rows, sources] to [rows, targets] in every layer. Drops targets past the last slot.

    Args:
      entries: the cache.
      rows: int32[B, 1].
      sources: int32[B, N], slots.
      targets: int32[B, N], slots.
    """

    def move(part: jax.Array) -> jax.Array:
        layers = jnp.arange(part.shape[1])[None, :, None]
        kept = part[rows[..., None], layers, sources[:, None]]
        return part.at[rows[..., None], layers, targets[:, None]].set(kept, mode="drop")

    moved: Entries = jax.tree.map(move, entries)
    return moved


def _values(entries: Entries) -> jax.Array:
    """The values of entries of any form, in float32."""
    if isinstance(entries, QuantizedEntries):
        return dequantize_entries(entries)
    if entries.dtype == jnp.uint16:
        entries = lax.bitcast_convert_type(entries, jnp.bfloat16)
    return entries.astype(jnp.float32)


def quantize_entries(x: Float[Array, "*slots K E"], bits: int) -> QuantizedEntries:
    """Rounds every head's vector to its own asymmetric grid, which contains zero.

    A vector whose scale would be subnormal in float32 becomes zeros.

    Args:
      x: bf16 or f32[..., K, E].
      bits: 8 or 4.
    """
    x = x.astype(jnp.float32)
    levels = 2**bits - 1
    low, high = jnp.minimum(jnp.min(x, axis=-1), 0), jnp.maximum(jnp.max(x, axis=-1), 0)
    # Explicit reciprocals, because XLA replaces only some divisions by them.
    scales = (high - low) * (1 / levels)
    scales = jnp.where(scales < np.finfo(np.float32).tiny, 0, scales)
    inverse = jnp.where(scales == 0, 0, 1 / jnp.where(scales == 0, 1, scales))
    zeros = jnp.round(-low * inverse)
    codes = jnp.round(x * inverse[..., None]) + zeros[..., None]
    codes = jnp.clip(codes, 0, levels).astype(jnp.uint8)
    if bits == 4:
        half = codes.shape[-1] // 2
        codes = codes[..., :half] | codes[..., half:] << 4
    return QuantizedEntries(codes, scales, zeros.astype(jnp.uint8), bits)


def dequantize_entries(entries: QuantizedEntries) -> Float32[Array, "*slots K E"]:
    """The values that entries stand for: f32[..., K, E]."""
    codes = entries.codes
    if entries.bits == 4:
        codes = jnp.concatenate((codes & 0xF, codes >> 4), axis=-1)
    differences = codes.astype(jnp.int32) - entries.zeros.astype(jnp.int32)[..., None]
    return differences.astype(jnp.float32) * entries.scales[..., None]
