"""Rotates the queries and keys of new tokens, and writes keys and values into the cache, in place.

XLA needs five launches for it; one kernel does all. A program serves one head of one token. It adds
the segments that a product leaves apart (`segments.Sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.triton_gpu.segments import Sums, add_segments, whole


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
    heads = [each.shape[2] for each in (queries, keys, values)]
    new, e = jnp.concatenate((queries, keys, values), axis=2), queries.shape[3]
    parts = new.reshape(1, -1, new.shape[2] * e)  # joined, because apart they take a launch each
    firsts = 0, heads[0] * e, (heads[0] + heads[1]) * e
    sums = [Sums(parts, first, n * e) for first, n in zip(firsts, heads, strict=True)]
    return rotate_and_write_sums(sums, rope, cached, lengths, layer, interpret=interpret)


def rotate_and_write_sums(
    new: Sequence[Sums],
    rope: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    lengths: jax.Array,
    layer: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes `rotate_and_write` from the products of queries, keys and values.

    Args:
      new: of B · T rows, and E columns for every head.
      rope, cached, lengths, layer: as in `pallas_kernels.new_entries.rotate_and_write`.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      The queries, bf16[B, T, H, E], and the cache.
    """
    b, t, half = rope[0].shape
    layers, slots, kv_heads, e = cached[0].shape[1:]
    heads = new[0].outputs // e

    def entries(first: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, layers, slots, None, e),
            lambda i, j, h: (i, 0, 0, jnp.clip(h - first, 0, kv_heads - 1), 0),
        )

    cache = [entries(heads), entries(heads + kv_heads)]
    turned, *written = pl.pallas_call(
        partial(
            _kernel, firsts=[each.first for each in new], tokens=t, heads=heads,
            kv_heads=kv_heads, slots=slots,
        ),
        grid=(b, t, heads + 2 * kv_heads),
        in_specs=[
            *[whole(each.parts) for each in new],
            *[pl.BlockSpec((None, None, half), lambda i, j, h: (i, j, 0))] * 2,
            pl.BlockSpec((None,), lambda i, j, h: (i,)),
            pl.BlockSpec((None,), lambda i, j, h: (0,)),
            *cache,
        ],
        out_specs=[
            pl.BlockSpec(
                (None, None, None, e), lambda i, j, h: (i, j, jnp.minimum(h, heads - 1), 0)
            ),
            *cache,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((b, t, heads, e), jnp.bfloat16),
            *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cached),
        ],
        input_output_aliases={7: 1, 8: 2},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(*(each.parts for each in new), *rope, lengths, layer[None], *cached)  # fmt: skip
    return turned, (written[0], written[1])


def _kernel(
    queries: jax.Ref, keys: jax.Ref, values: jax.Ref, cos: jax.Ref, sin: jax.Ref, length: jax.Ref,
    layer: jax.Ref, _keys: jax.Ref, _values: jax.Ref, turned: jax.Ref, key_cache: jax.Ref,
    value_cache: jax.Ref, *, firsts: Sequence[int], tokens: int, heads: int, kv_heads: int,
    slots: int,
) -> None:  # fmt: skip
    """queries, keys, values: f32[P, rows, columns], with their first columns; cos, sin: f32[E / 2];
    length, layer: int32[]; turned: bf16[E]; the caches: uint16[L, S, E], aliased."""
    half = cos.shape[0]
    halves = pl.ds(0, half), pl.ds(half, half)
    head, slot, number = pl.program_id(2), length[...] + pl.program_id(1), layer[...]
    row = pl.program_id(0) * tokens + pl.program_id(1)

    def summed(parts: jax.Ref, first: int, head: jax.Array) -> list[jax.Array]:
        start = first + head * 2 * half
        return [add_segments(parts, row, start + at + jnp.arange(half)) for at in (0, half)]

    def rotated(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return first * cos[...] - second * sin[...], second * cos[...] + first * sin[...]

    def write(cache: jax.Ref, parts: Iterable[jax.Array]) -> None:
        for each, part in zip(halves, parts, strict=True):
            bits = lax.bitcast_convert_type(part.astype(jnp.bfloat16), jnp.uint16)
            inside = jnp.full(bits.shape, slot < slots)
            pltriton.store(cache.at[number, slot, each], bits, mask=inside)

    def query() -> None:
        for each, part in zip(halves, rotated(*summed(queries, firsts[0], head)), strict=True):
            turned[each] = part.astype(jnp.bfloat16)

    def key() -> None:
        write(key_cache, rotated(*summed(keys, firsts[1], head - heads)))

    def value() -> None:
        write(value_cache, summed(values, firsts[2], head - heads - kv_heads))

    ends = heads, heads + kv_heads, heads + 2 * kv_heads
    _pick(head, ends, (query, key, value))


def _pick(place: jax.Array, ends: Sequence[int], branches: Sequence[Callable[[], None]]) -> None:
    """Calls the branch of the range, one behind another, in which a place lies."""
    first = 0
    for end, branch in zip(ends, branches, strict=True):
        pl.when((place >= first) & (place < end))(branch)
        first = end
