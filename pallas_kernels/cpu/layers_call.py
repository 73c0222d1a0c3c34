"""Decoder layers in one call on CPUs, by the C++ library (src/layers/layers.cc)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels.cache_entries import Entries
from pallas_kernels.cpu.batches import as_rows, entry
from pallas_kernels.cpu.matmul_call import collected, describe
from pallas_kernels.cpu.native import check_available
from pallas_kernels.layers import Layers

Arrays = tuple[jax.Array, ...]
_ROWS = 3  # x, keys and values, whose first axis is of rows and which the call returns


def layers(
    x: jax.Array,
    keys: Entries,
    values: Entries,
    lengths: jax.Array,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    ancestors: jax.Array | None,
    weights: Layers,
    *,
    numbers: Sequence[int],
    windows: Sequence[int | None],
    sinks: Sequence[int],
    eps: float,
    head_scale: float,
    instruction_set: str | None = None,
) -> tuple[jax.Array, Entries, Entries]:
    """Runs decoder layers with RMSNorm, RoPE, grouped queries and SwiGLU on the residual stream x.

    The bits are those of `matmul`, `attention`, `rms_norm`, `rotate` and `swiglu` one by one.

    Args:
      x: bf16 or f32[B, T, D].
      keys: the cache, [R, L, S, K, E]: uint16 holding bfloat16 bits, or float32, like x; not
        quantized. x belongs to the first of R rows.
      values: like the keys.
      lengths: int32[B], slots of context per row. New entries go to the slots behind.
      positions: int32[B, T].
      rope: cosines and sines of the positions' angles, f32[B, T, E / 2] each.
      ancestors: as in `pallas_kernels.attention.attention`.
      weights: those of all layers.
      numbers: the layers to run, in order.
      windows: for each of them, the positions that a token sees; None for all.
      sinks: for each of them, the first positions that a token sees whatever the window.
      eps: added to the means of norms.
      head_scale: multiplies attention scores.
      instruction_set: one of `native.instruction_sets()`; None for the best.

    Returns:
      x after the layers, and the keys and values with the new entries.

    Raises:
      ValueError: the library was not built, or this machine lacks the instruction set.
    """
    check_available("layers", instruction_set)
    described = [
        describe(weight, activation)
        for weight, activation in zip(weights.linears, weights.activations, strict=True)
    ]
    attributes = collected(described) | {
        "stacked": np.ones(len(described), np.int64),
        "biased": np.array([bias is not None for bias in weights.biases], np.int64),
        "numbers": np.array(numbers, np.int64),
        "windows": np.array([-1 if each is None else max(each, 0) for each in windows], np.int64),
        "sinks": np.array(sinks, np.int64),
        "tree": ancestors is not None,
        "head_norms": weights.q_norm is not None,
        "eps": np.float32(eps),
        "scale": np.float32(head_scale * math.log2(math.e)),  # the kernel uses exp2
        "instruction_set": instruction_set or "",
    }
    by_row = (x, keys, values, ancestors, lengths, positions, *rope)
    others = [weights.attention_norm, weights.mlp_norm, weights.q_norm, weights.k_norm]
    for each, bias in zip(described, weights.biases, strict=True):
        others += [*each.buffers, bias]
    x, keys, values = _batched_by_rows(attributes)(by_row, tuple(others))
    return x, keys, values


def _batched_by_rows(attributes: dict[str, Any]) -> Any:
    """The FFI call. Under vmap, batches become more rows; batched weights, and caches of more rows
    than x, run one by one."""

    @custom_vmap
    def call(by_row: Arrays, others: Arrays) -> Arrays:
        results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in by_row[:_ROWS]]
        given = [array for array in (*by_row, *others) if array is not None]
        made = jax.ffi.ffi_call("specjax_layers", results, input_output_aliases={1: 1, 2: 2})
        return tuple(made(*given, **attributes))

    @call.def_vmap
    def by_batches(
        axis_size: int, in_batched: list[Any], by_row: Arrays, others: Arrays
    ) -> tuple[Arrays, tuple[bool, ...]]:
        given, batched = (by_row, others), tuple(map(tuple, in_batched))
        more = by_row[0].shape[-3] < by_row[1].shape[-5]
        if more or any(jax.tree.leaves(batched[1])):
            ys: Arrays = lax.map(
                lambda index: call(*entry(given, batched, index)), jnp.arange(axis_size)
            )
        else:
            ys = call(as_rows(by_row, batched[0], axis_size), others)
            ys = tuple(y.reshape(axis_size, -1, *y.shape[1:]) for y in ys)
        return ys, (True,) * _ROWS

    return call
