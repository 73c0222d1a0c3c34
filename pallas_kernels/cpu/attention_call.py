"""Attention over the KV cache on CPUs, by the C++ library (src/attention/attention.cc)."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels.cache_entries import Entries, QuantizedEntries
from pallas_kernels.cpu.batches import as_rows, entry
from pallas_kernels.cpu.native import check_available

# queries, keys, values, lengths, positions, layer; scales and zeros of keys and of values; the
# ancestors
Operands = tuple[jax.Array | None, ...]


def attention(
    queries: jax.Array,
    keys: Entries,
    values: Entries,
    lengths: jax.Array,
    positions: jax.Array,
    ancestors: jax.Array | None,
    layer: jax.Array,
    *,
    window: int | None,
    sinks: int = 0,
    head_scale: float,
    instruction_set: str | None = None,
) -> jax.Array:
    """Computes `pallas_kernels.attention.attention` for any number of cache slots.

    Args:
      instruction_set: one of `native.instruction_sets()`; None for the best.

    Raises:
      ValueError: the library was not built, or this machine lacks the instruction set.
    """
    check_available("attention", instruction_set)
    attributes = {
        "window": np.int64(-1 if window is None else max(window, 0)),
        "sinks": np.int64(sinks),
        "scale": np.float32(head_scale * math.log2(math.e)),  # the kernel uses exp2
        "instruction_set": instruction_set or "",
    }
    key_codes, *key_grid = _parts(keys)
    value_codes, *value_grid = _parts(values)
    operands = (queries, key_codes, value_codes, lengths, positions, layer, *key_grid, *value_grid)
    return _batched_by_rows(attributes)(*operands, ancestors)


def _parts(entries: Entries) -> tuple[jax.Array | None, ...]:
    """The values or codes in the slots, their scales and their zeros."""
    if isinstance(entries, QuantizedEntries):
        return entries.codes, entries.scales, entries.zeros
    return entries, None, None


def _batched_by_rows(attributes: dict[str, object]) -> Callable[..., jax.Array]:
    """The FFI call. Under vmap, batched caches of as many rows as the queries become more rows;
    other batches run one by one."""

    @custom_vmap
    def call(queries: jax.Array, *others: jax.Array | None) -> jax.Array:
        result = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
        buffers = [queries, *(operand for operand in others if operand is not None)]
        return jax.ffi.ffi_call("specjax_attention", result)(*buffers, **attributes)

    @call.def_vmap
    def batched(
        axis_size: int, in_batched: list[bool], *operands: jax.Array | None
    ) -> tuple[jax.Array, bool]:
        given = tuple(in_batched)
        queries, keys = operands[:2]
        assert queries is not None and keys is not None
        like = queries.shape[-4] == keys.shape[-5]
        if like and given[1] and given[2] and not given[5]:  # the layer belongs to no row
            rows = as_rows(operands[:5] + operands[6:], given[:5] + given[6:], axis_size)
            y = call(*rows[:5], operands[5], *rows[5:])
            y = y.reshape(axis_size, -1, *y.shape[1:])
        else:  # repeated caches would cost more than repeated calls
            y = lax.map(lambda index: call(*entry(operands, given, index)), jnp.arange(axis_size))
        return y, True

    return call
