"""The cache against a plain model of it: a list of entries per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.model.config import ModelConfig
from specjax.model.kv_cache import KVCache

CONFIG = ModelConfig(8, 8, 8, 2, 2, 1, 4, dtype="float32")
ROWS, T = 3, 3

rounds = st.lists(st.tuples(*[st.integers(0, T)] * ROWS), max_size=12)


@settings(max_examples=40, deadline=None)
@given(kept=rounds)
def test_rows_advance_on_their_own_and_overwrite_what_was_not_kept(kept) -> None:
    """Write T entries per row, keep some of them, write again: kept entries stay in order."""
    cache = KVCache.create(CONFIG, ROWS, 64)
    model: list[list[float]] = [[] for _ in range(ROWS)]
    for number, counts in enumerate(kept):
        entries = 1.0 + number * T + np.arange(T)
        new = jnp.broadcast_to(
            jnp.asarray(entries, jnp.float32)[None, :, None, None], (ROWS, T, 1, 4)
        )
        for layer in range(CONFIG.num_layers):
            cache = cache.write(layer, new * (layer + 1), -new)
        cache = cache.with_lengths(cache.lengths + jnp.array(counts))
        for row, count in enumerate(counts):
            model[row] += entries[:count].tolist()
    for row, expected in enumerate(model):
        assert int(cache.lengths[row]) == len(expected)
        for layer in range(CONFIG.num_layers):
            keys = cache.keys[row, layer, : len(expected), 0, 0]
            values = cache.values[row, layer, : len(expected), 0, 0]
            assert keys.tolist() == [(layer + 1) * entry for entry in expected]
            assert values.tolist() == [-entry for entry in expected]


def test_writes_past_the_capacity_are_dropped() -> None:
    cache = KVCache.create(CONFIG, 1, 128).with_lengths(jnp.array([127], jnp.int32))
    cache = cache.write(0, jnp.ones((1, 3, 1, 4)), jnp.ones((1, 3, 1, 4)))
    assert cache.keys[0, 0, 127].all() and not cache.keys[0, 0, :127].any()


def test_bfloat16_is_stored_as_its_bits() -> None:
    config = ModelConfig(8, 8, 8, 1, 2, 1, 4, dtype="bfloat16")
    new = jnp.full((1, 1, 1, 4), 1.5, jnp.bfloat16)
    cache = KVCache.create(config, 1, 16).write(0, new, new)
    assert cache.keys.dtype == jnp.uint16
    assert cache.keys[0, 0, 0, 0, 0] == np.asarray(jnp.bfloat16(1.5)).view(np.uint16)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_row_takes_the_blocks_with_entries_of_another_cache(bits: int) -> None:
    """Into that row alone; a row that another device has takes nothing."""
    before, other = (
        jax.tree.map(lambda leaf, fill=fill: jnp.full_like(leaf, fill), cache)
        for fill, cache in ((1, KVCache.create(CONFIG, ROWS, 400, bits)),
                            (2, KVCache.create(CONFIG, 1, 400, bits)))
    )  # fmt: skip
    other = other.with_lengths(jnp.array([130], jnp.int32))  # 4 blocks of 128 slots, 2 in use
    after = jax.jit(KVCache.put_row)(before, jnp.int32(1), other)
    for leaf in jax.tree.leaves((after.keys, after.values)):
        assert (np.asarray(leaf)[1, :, :256] == 2).all()
        assert (np.asarray(leaf)[1, :, 256:] == 1).all()
        assert (np.asarray(leaf)[[0, 2]] == 1).all()
    assert after.lengths.tolist() == [1, 130, 1]
    elsewhere = jax.jit(KVCache.put_row)(before, jnp.int32(ROWS), other)
    jax.tree.map(np.testing.assert_array_equal, elsewhere, before)
