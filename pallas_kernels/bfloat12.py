"""bfloat16 in 12 bits, exactly: the low bytes as they are, the high bytes as 4-bit codes.

The high byte of a bfloat16 holds the sign and the upper seven bits of the exponent. Trained weights
that lie side by side have similar exponents, so few high bytes occur among them. Every piece of
TILE outputs by PALETTE_INPUTS inputs has a palette: its 16 most frequent high bytes. They usually
span 16 exponents of either sign, and hold zero where a matrix has many zeros. A weight is its low
byte and the number of its high byte in the palette. Other high bytes are escapes, listed for every
tile in the order of the inputs.

The weights of a tile are stored as CPUs read them fastest (`pallas_kernels.interleave`), on every
platform. Kernels for CPUs and GPUs rebuild the bfloat16 in registers and multiply in the order of
the plain matrix, so products have the same bits. On TPUs the reference multiplies the plain matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt16

from pallas_kernels.arrays import TILE, Arrays

BLOCK_INPUTS = 8  # whose words stand together
PALETTE = 16  # codes
PALETTE_INPUTS = 256
MOST_INPUTS = 2**20 - PALETTE_INPUTS
NO_ESCAPE = np.uint32(2**32 - 1)
# Escapes beyond this share of a matrix's weights would cost more than the smaller weight saves.
MOST_ESCAPES = 1 / 128
_ORDER = np.array([0, 2, 1, 3])  # of the inputs in a word; its own inverse
_SHARE = 2**18  # weights that are encoded at once: what is made of them stays in the caches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bfloat12Weight(Arrays):
    """A bfloat16 matrix in 12 bits a weight, exactly. Tile t holds outputs 16t … 16t + 15:

        w[n, k] = the bfloat16 of bits high · 256 + low
        high = palettes[t, k // 256, code], or what an escape of tile t says

    packed: uint8[T, 3 · ceil(K / 8), 16 · 4], T = ceil(N / 16). Three words of an output stand for
        8 inputs: two hold the low bytes of inputs 0, 2, 1, 3 and 4, 6, 5, 7, and the third the
        codes, in low nibbles those of the first word and in high nibbles those of the second.
    palettes: uint8[T, ceil(K / 256), 16].
    escapes: uint32[T, E], each input · 4096 + (output in the tile) · 256 + high, in rising order.
        `NO_ESCAPE` fills a row of fewer.
    in_features: K.
    padded_outputs: outputs that the last tile lacks, 0 … 15: N is 16 · T less these.
    """

    packed: jax.Array
    palettes: jax.Array
    escapes: jax.Array
    in_features: int = jax.tree.static()
    padded_outputs: int = jax.tree.static(default=0)

    @property
    def out_features(self) -> int:
        """N, as of an interleaved weight; in a stack too."""
        return TILE * self.packed.shape[-3] - self.padded_outputs

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.out_features, self.in_features


def bfloat12(
    bits: UInt16[Array | np.ndarray, "N K"], most_escapes: float = MOST_ESCAPES
) -> tuple[Bfloat12Weight | None, int]:
    """Encodes a bfloat16 matrix.

    Args:
      bits: uint16[N, K], not traced.
      most_escapes: the largest share of its values that may be escapes.

    Returns:
      The weight, or None if it has more escapes or more than `MOST_INPUTS` inputs; and the number
      of escapes.
    """
    held = np.asarray(bits)
    n, k = held.shape
    if k > MOST_INPUTS:
        return None, 0
    parts = [_encode(part) for part in _tiles(held)]
    count = sum(int(np.count_nonzero(found != NO_ESCAPE)) for _, _, found in parts)
    if count > most_escapes * held.size:
        return None, count
    most = max(found.shape[1] for _, _, found in parts)
    packed, palettes = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    escapes = np.concatenate([_filled(found, most) for _, _, found in parts])
    packed, palettes, escapes = jax.device_put((packed, palettes, escapes))
    return Bfloat12Weight(packed, palettes, escapes, k, -n % TILE), count


def with_room(weight: Bfloat12Weight, count: int) -> Bfloat12Weight:
    """Returns the same weight with room for `count` escapes in every tile."""
    if weight.escapes.shape[1] == count:
        return weight
    escapes = jax.device_put(_filled(np.asarray(weight.escapes), count))
    return dataclasses.replace(weight, escapes=escapes)


def some_bits(weight: Bfloat12Weight, indices: Int[Array, " R"]) -> UInt16[Array, "R K"]:
    """Decodes rows of a weight.

    Args:
      weight: (N, K).
      indices: int[R], in 0 … N - 1.

    Returns:
      uint16[R, K].
    """
    rows, lanes = len(indices), indices % TILE
    tiles = indices // TILE
    words = weight.packed.reshape(weight.packed.shape[0], -1, 3, TILE, 4)[tiles, :, :, lanes]
    low = words[:, :, :2, _ORDER].reshape(rows, -1)  # [R, padded K]
    codes = jnp.stack((words[:, :, 2] & 15, words[:, :, 2] >> 4), axis=2)[..., _ORDER]
    codes = codes.reshape(rows, -1)
    palettes = weight.palettes[tiles].reshape(rows, -1)
    first = jnp.arange(codes.shape[1], dtype=jnp.int32) // PALETTE_INPUTS * PALETTE
    high = jnp.take_along_axis(palettes, first + codes.astype(jnp.int32), axis=1)
    escapes = weight.escapes[tiles]
    own = (escapes >> 8) % TILE == lanes[:, None].astype(jnp.uint32)
    inputs = jnp.where(own, escapes >> 12, MOST_INPUTS + PALETTE_INPUTS).astype(jnp.int32)
    at = (jnp.arange(rows, dtype=jnp.int32)[:, None], inputs)
    high = high.at[at].set(escapes.astype(jnp.uint8), mode="drop")
    bits = high.astype(jnp.uint16) << 8 | low.astype(jnp.uint16)
    return bits[:, : weight.in_features]


def _filled(escapes: np.ndarray, count: int) -> np.ndarray:
    """uint32[T, E] -> uint32[T, count]."""
    missing = count - escapes.shape[1]
    return np.pad(escapes, ((0, 0), (0, missing)), constant_values=NO_ESCAPE)


def _tiles(bits: np.ndarray) -> Iterator[np.ndarray]:
    """Yields whole tiles of a matrix, as many as are encoded at once; the last may lack rows."""
    rows = max(1, _SHARE // (TILE * bits.shape[1])) * TILE
    for first in range(0, bits.shape[0], rows):
        yield bits[first : first + rows]


def _encode(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint16[N, K] -> the arrays of a weight."""
    n, k = bits.shape
    tiles, palettes = -(-n // TILE), -(-k // PALETTE_INPUTS)
    low, high = (bits & 255).astype(np.uint8), (bits >> 8).astype(np.int64)
    pieces = np.arange(n)[:, None] // TILE * palettes + np.arange(k) // PALETTE_INPUTS
    places = pieces * 256 + high
    counts = np.bincount(places.ravel(), minlength=tiles * palettes * 256).reshape(-1, 256)
    most = np.argsort(-counts, axis=1, kind="stable")[:, :PALETTE]
    numbers = np.full(counts.shape, PALETTE, np.uint8)
    np.put_along_axis(numbers, most, np.arange(PALETTE, dtype=np.uint8)[None], axis=1)
    codes = numbers.ravel()[places]
    escaped = codes == PALETTE
    codes[escaped] = 0
    packed = _pack(low, codes)
    shape = (tiles, palettes, PALETTE)
    return packed, most.astype(np.uint8).reshape(shape), _escapes(escaped, high, tiles)


def _pack(low: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The words of both: uint8[N, K] twice -> uint8[T, words, 64]."""
    n, k = low.shape
    padding = ((0, -n % TILE), (0, -k % BLOCK_INPUTS))
    shape = -(-n // TILE), TILE, -(-k // BLOCK_INPUTS), 2, 4
    low, codes = (np.pad(each, padding).reshape(shape)[..., _ORDER] for each in (low, codes))
    third = codes[..., :1, :] | codes[..., 1:, :] << 4
    words = np.concatenate((low, third), axis=3).reshape(len(low), TILE, -1, 4)
    return words.swapaxes(1, 2).reshape(len(low), -1, TILE * 4)


def _escapes(escaped: np.ndarray, high: np.ndarray, tiles: int) -> np.ndarray:
    rows, inputs = np.nonzero(escaped)
    entries = inputs << 12 | rows % TILE << 8 | high[rows, inputs]
    order = np.lexsort((entries, rows // TILE))
    entries, of_tile = entries[order], rows[order] // TILE
    counts = np.bincount(of_tile, minlength=tiles)
    starts = np.cumsum(counts) - counts
    found = np.full((tiles, max(1, int(np.max(counts)))), NO_ESCAPE)
    found[of_tile, np.arange(len(entries)) - starts[of_tile]] = entries
    return found
