"""The KV cache: preallocated, functional, written at each row's own place.

    slots < lengths[b] hold the precise (verify-precision) entries of row b's committed tokens;
    slots >= lengths[b] are scratch that the next write covers.

QSpec's overwriting (section 3.1) needs nothing more: a draft writes past `lengths`, the
verification writes the same slots again, and a commit adds to `lengths`. The accepted path of a
tree moves into consecutive slots first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention import BLOCK
from pallas_kernels.cache_entries import (
    Entries,
    QuantizedEntries,
    empty_entries,
    move_entries,
    write_after,
)
from pallas_kernels.new_entries import rotate_and_write
from specjax.model.config import ModelConfig

SINKS = 4  # the first positions, which passes under a window see too (StreamingLLM, section 3.2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of every layer.

    keys, values: [R, L, S, K, E], S a multiple of the attention's block. float32, or uint16 holding
        bfloat16 bits (XLA:CPU would convert a whole bfloat16 cache at every update), or
        `QuantizedEntries`.
    lengths: int32[B], committed slots per row. Passes are over B rows: all, or the first ones.
    window: how many positions back a pass sees, beside the first SINKS; None: as far as the model.
        A draft may read less of the cache than the verification.
    """

    keys: Entries
    values: Entries
    lengths: jax.Array
    window: int | None = jax.tree.static(default=None)

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        rows: int,
        capacity: int,
        bits: int = 16,
        heads: int | None = None,
    ) -> KVCache:
        """Returns an empty cache for `rows` rows of at least `capacity` slots each.

        bits: 8 or 4 to quantize the entries; 16 to hold them in the model's dtype.
        heads: key-value heads; None: the model's.
        """
        slots = -(-capacity // BLOCK) * BLOCK
        heads = config.num_kv_heads if heads is None else heads
        shape = (rows, config.num_layers, slots, heads, config.head_dim)
        keys, values = (empty_entries(shape, config.dtype, bits) for _ in range(2))
        return cls(keys, values, jnp.zeros(rows, jnp.int32))

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.keys.shape[2]

    @property
    def bits(self) -> int:
        """Bits per entry: 8 or 4 where entries are quantized, 16 where they are not."""
        return self.keys.bits if isinstance(self.keys, QuantizedEntries) else 16

    def write(
        self,
        layer: Int32[Array, ""] | int,
        keys: Float[Array, "B T K E"],
        values: Float[Array, "B T K E"],
    ) -> KVCache:
        """Writes T new entries per row to the slots lengths … lengths + T - 1; `lengths` stays.

        layer: the layer that they belong to, int32[].
        keys, values: bf16 or f32[B, T, K, E]. Entries past the capacity are dropped.
        """
        cached, new = (self.keys, self.values), (keys, values)
        after = write_after(cached, self.lengths, layer, new)
        return dataclasses.replace(self, keys=after[0], values=after[1])

    def write_rotated(
        self,
        layer: Int32[Array, ""] | int,
        queries: Float32[Array, "B T H E"],
        keys: Float32[Array, "B T K E"],
        values: Float32[Array, "B T K E"],
        rope: tuple[Float32[Array, "B T E//2"], Float32[Array, "B T E//2"]],
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "B T H E"], KVCache]:
        """Rotates queries and keys, and writes as `write` does into a cache that is not quantized.

        queries: f32[B, T, H, E]; keys, values: f32[B, T, K, E].
        rope: cosines and sines of the tokens' angles, f32[B, T, E / 2] each.
        dtype: that of the model; the rotated queries come in it.
        """
        cached = self.keys, self.values
        queries, (keys, values) = rotate_and_write(
            queries, keys, values, rope, cached, self.lengths, layer, dtype
        )
        return queries, dataclasses.replace(self, keys=keys, values=values)

    def move(self, sources: Int32[Array, "B N"], targets: Int32[Array, "B N"]) -> KVCache:
        """Copies entries from slots to slots of every layer, in place. int32[B, N] each.

        Every source is read before the first target is written. Targets past the capacity are
        dropped.
        """
        rows = jnp.arange(sources.shape[0])[:, None]
        keys, values = (
            move_entries(entries, rows, sources, targets) for entries in (self.keys, self.values)
        )
        return dataclasses.replace(self, keys=keys, values=values)

    def first(self, rows: int) -> KVCache:
        """Returns the same entries for passes over the first rows."""
        return self.with_lengths(self.lengths[:rows])

    def put_first(self, other: KVCache) -> KVCache:
        """Returns what `first` has made of this cache, for passes over all rows again."""
        return other.with_lengths(self.lengths.at[: len(other.lengths)].set(other.lengths))

    def move_row(self, source: Int32[Array, ""], target: Int32[Array, ""]) -> KVCache:
        """Copies the committed entries of one row to another one's slots. int32[] each."""
        return self._copied(self, source, target)

    def put_row(self, row: Int32[Array, ""], other: KVCache) -> KVCache:
        """Returns the cache with the committed entries of another's only row in one of its rows.

        row: int32[]. Nothing is written to a row past the last.
        other: of one row, and of as many slots.
        """
        return self._copied(other, jnp.int32(0), row)

    def _copied(self, other: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
        """Copies, block by block, the committed entries of a row of `other`, which may be this."""
        zero, within = jnp.int32(0), other is self

        def put(block: jax.Array, cached: tuple[Entries, Entries]) -> tuple[Entries, Entries]:
            start = block * BLOCK

            def write(whole: jax.Array, given: jax.Array) -> jax.Array:
                others = [zero] * (whole.ndim - 3)
                size = (1, whole.shape[1], BLOCK, *whole.shape[3:])
                part = lax.dynamic_slice(given, [source, zero, start, *others], size)
                return lax.dynamic_update_slice(whole, part, [target, zero, start, *others])

            from_where = cached if within else (other.keys, other.values)
            written: tuple[Entries, Entries] = jax.tree.map(write, cached, from_where)
            return written

        length = other.lengths[source]
        blocks = jnp.where(target < self.lengths.shape[0], -(-length // BLOCK), 0)
        keys, values = lax.fori_loop(0, blocks, put, (self.keys, self.values))
        lengths = self.lengths.at[target].set(length)
        return dataclasses.replace(self, keys=keys, values=values, lengths=lengths)

    def sight(self, window: int | None) -> tuple[int | None, int]:
        """The window of a layer's attention and its sinks. window: the layer's own, or None."""
        if self.window is None or (window is not None and window <= self.window):
            return window, 0
        return self.window, SINKS

    def with_window(self, window: int | None) -> KVCache:
        """Returns the same entries for passes that see `window` positions back."""
        return dataclasses.replace(self, window=window)

    def with_lengths(self, lengths: Int32[Array | np.ndarray, " B"]) -> KVCache:
        """Returns the same entries with another number of committed slots: commit, advance or roll
        back."""
        given: Any = lengths  # an array of the host costs no program before the next one
        return dataclasses.replace(self, lengths=given)
