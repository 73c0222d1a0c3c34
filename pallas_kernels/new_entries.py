"""Rotates the queries and keys of new tokens, and writes their keys and values into the cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.cache_entries import Unquantized, write_after
from pallas_kernels.platforms import by_platform, deferred
from pallas_kernels.rope import rotate
from pallas_kernels.rounding import round_to
from pallas_kernels.settings import own_settings


@partial(jax.jit, static_argnames="dtype")
@own_settings()
def rotate_and_write(
    queries: Float32[Array, "B T H E"],
    keys: Float32[Array, "B T K E"],
    values: Float32[Array, "B T K E"],
    rope: tuple[Float32[Array, "B T E//2"], Float32[Array, "B T E//2"]],
    cached: tuple[Unquantized, Unquantized],
    lengths: Int32[Array, " B"],
    layer: Int32[Array, ""] | int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B T H E"], tuple[Unquantized, Unquantized]]:
    """Rotates queries and keys, and writes keys and values to slots lengths … lengths + T - 1.

    Args:
      queries: f32[B, T, H, E].
      keys, values: f32[B, T, K, E].
      rope: cosines and sines of the tokens' angles, f32[B, T, E / 2] each.
      cached: keys and values of all layers, unquantized, [B, L, S, K, E] each.
      lengths: int32[B].
      layer: int32[].
      dtype: to which all three are rounded, bfloat16 or float32; the cache's.

    Returns:
      The queries, `dtype`[B, T, H, E], and the cache. Entries past the capacity are dropped.
    """
    kernels: dict[str, Any] = {}
    e = queries.shape[-1]
    if cached[0].dtype == jnp.uint16 and e & e - 1 == 0:
        kernels["cuda"] = deferred("triton_gpu", "rotate_and_write")
    written: tuple[jax.Array, tuple[jax.Array, jax.Array]] = by_platform(
        queries, keys, values, rope, cached, lengths, jnp.int32(layer),
        result=(
            jax.ShapeDtypeStruct(queries.shape, dtype),
            tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cached),
        ),
        default=partial(_one_by_one, dtype=dtype),
        **kernels,
    )  # fmt: skip
    return written


def _one_by_one(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    lengths: jax.Array,
    layer: jax.Array,
    *,
    dtype: DTypeLike,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    queries, keys = (rotate(each, *rope, dtype) for each in (queries, keys))
    written: Any = write_after(cached, lengths, layer, (keys, round_to(values, dtype)))
    return queries, written
