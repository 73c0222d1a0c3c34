"""32-bit words inside a Triton kernel, and the values that they hold."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.words import ArrayWord


class Word(ArrayWord):
    """An array of words whose bytes are selected by the GPU's instruction."""

    @staticmethod
    def select_bytes(
        low: ArrayWord | int, high: ArrayWord | int, selector: ArrayWord | int
    ) -> Word:
        operands = [
            each.value if isinstance(each, ArrayWord) else jnp.uint32(each)
            for each in (low, high, selector)
        ]
        shape = jnp.broadcast_shapes(*(each.shape for each in operands))
        [selected] = pltriton.elementwise_inline_asm(
            "prmt.b32 $0, $1, $2, $3;",
            args=[
                lax.bitcast_convert_type(jnp.broadcast_to(each, shape), jnp.int32)
                for each in operands
            ],
            constraints="=r,r,r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
        )
        return Word(lax.bitcast_convert_type(selected, jnp.uint32))


def as_words(array: jax.Array) -> jax.Array:
    """uint8[..., 4 · W] -> uint32[..., W], the first byte lowest. It copies nothing."""
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 4), jnp.uint32)


def halves(word: ArrayWord) -> list[jax.Array]:
    """The two numbers of 16 bits in words, the lower first: uint16[...] each."""
    return [(word >> shift).value.astype(jnp.uint16) for shift in (0, 16)]


def bytes_(word: ArrayWord) -> list[jax.Array]:
    """The four numbers of 8 bits in words, the lowest first: int8[...] each."""
    return [(word >> 8 * place).value.astype(jnp.int8) for place in range(4)]


def interleaved(values: Sequence[jax.Array]) -> jax.Array:
    """Joins 2, 4 or 8 arrays along a new last axis: [...] each -> [..., count]."""
    shape, parts = (*values[0].shape, len(values)), list(values)
    while len(parts) > 1:  # value i of the first half belongs before value i of the second
        half = len(parts) // 2
        parts = [
            jnp.concatenate((parts[i][..., None], parts[i + half][..., None]), axis=-1)
            for i in range(half)
        ]
    return parts[0].reshape(shape)
