"""Rotates the queries and keys of new tokens, and writes keys and values into the cache, in place.

XLA needs five launches for it. Here it joins queries, keys and values in one, which adds the sums
that products left apart, and a kernel does the rest. A program serves one head of one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def rotate_and_write(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    lengths: jax.Array,
    layer: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes `pallas_kernels.new_entries.rotate_and_write` for a cache of bfloat16 bits.

    Args:
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    The number of features is a power of two.
    """
    b, t, heads, e = queries.shape
    layers, slots, kv_heads = cached[0].shape[1:4]
    new = jnp.concatenate((queries, keys, values), axis=2)

    def entries(first: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, layers, slots, None, e),
            lambda i, j, h: (i, 0, 0, jnp.clip(h - first, 0, kv_heads - 1), 0),
        )

    one = (None, None, None, e)
    cache = [entries(heads), entries(heads + kv_heads)]
    turned, *written = pl.pallas_call(
        partial(_kernel, heads=heads, kv_heads=kv_heads, slots=slots),
        grid=(b, t, new.shape[2]),
        in_specs=[
            pl.BlockSpec(one, lambda i, j, h: (i, j, h, 0)),
            *[pl.BlockSpec((None, None, e // 2), lambda i, j, h: (i, j, 0))] * 2,
            pl.BlockSpec((None,), lambda i, j, h: (i,)),
            pl.BlockSpec((None,), lambda i, j, h: (0,)),
            *cache,
        ],
        out_specs=[pl.BlockSpec(one, lambda i, j, h: (i, j, jnp.minimum(h, heads - 1), 0)), *cache],
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, jnp.bfloat16),
            *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cached),
        ],
        input_output_aliases={5: 1, 6: 2},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(new, *rope, lengths, layer[None], *cached)
    return turned, (written[0], written[1])


def _kernel(
    new: jax.Ref, cos: jax.Ref, sin: jax.Ref, length: jax.Ref, layer: jax.Ref, _keys: jax.Ref,
    _values: jax.Ref, turned: jax.Ref, keys: jax.Ref, values: jax.Ref, *, heads: int,
    kv_heads: int, slots: int,
) -> None:  # fmt: skip
    """new: f32[E]; cos, sin: f32[E / 2]; length, layer: int32[]; turned: bf16[E]; keys, values:
    uint16[L, S, E], the aliased cache."""
    half = new.shape[0] // 2
    halves = pl.ds(0, half), pl.ds(half, half)
    head, slot, number = pl.program_id(2), length[...] + pl.program_id(1), layer[...]

    def rotated() -> tuple[jax.Array, jax.Array]:
        first, second = (new[each] for each in halves)
        return first * cos[...] - second * sin[...], second * cos[...] + first * sin[...]

    def write(cache: jax.Ref, parts: Iterable[jax.Array]) -> None:
        for each, part in zip(halves, parts, strict=True):
            bits = lax.bitcast_convert_type(part.astype(jnp.bfloat16), jnp.uint16)
            inside = jnp.full(bits.shape, slot < slots)
            pltriton.store(cache.at[number, slot, each], bits, mask=inside)

    @pl.when(head < heads)
    def query() -> None:
        for each, part in zip(halves, rotated(), strict=True):
            turned[each] = part.astype(jnp.bfloat16)

    @pl.when((head >= heads) & (head < heads + kv_heads))
    def key() -> None:
        write(keys, rotated())

    @pl.when(head >= heads + kv_heads)
    def value() -> None:
        write(values, (new[each] for each in halves))
