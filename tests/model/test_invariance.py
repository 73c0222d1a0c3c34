"""Batch invariance: a row's result does not depend on what shares the call with it.

The library's promise (drafting never changes greedy output) rests on this, so it is tested as such:
bit for bit, for kernels and for the whole model.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools.quantization.rtn import round_to_nearest
from pallas_kernels.attention import attention
from pallas_kernels.matmul import matmul
from pallas_kernels.norms import rms_norm
from specjax.model.kv_cache import KVCache
from specjax.model.transformer import forward
from tests.support.random_models import CONFIG, quantized_model, random_model

pytestmark = pytest.mark.optimized

SIZES = (1, 2, 7, 8, 9, 33)


def _same_rows(function, x: jax.Array, sizes: tuple[int, ...] = SIZES) -> None:
    """function(x[:m]) equals function(x)[:m] in every bit, and rows may be shuffled."""
    whole = np.asarray(function(x))
    for m in sizes:
        np.testing.assert_array_equal(np.asarray(function(x[:m])), whole[:m], err_msg=f"M = {m}")
    order = np.random.default_rng(0).permutation(len(x))
    np.testing.assert_array_equal(np.asarray(function(x[order])), whole[order])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(512, 256), (33, 172)])
@pytest.mark.covering(1)
def test_matmul(n: int, k: int, dtype: str) -> None:
    rng = np.random.default_rng(k)
    x = jnp.asarray(rng.normal(size=(33, k)) * np.exp(rng.normal(size=(33, 1))), dtype)
    plain = jnp.asarray(rng.normal(size=(n, k)), dtype)
    weight = round_to_nearest(plain, 128)
    _same_rows(lambda x: matmul(x, plain), x)
    for activation in ("a16", "a8", "a4"):
        _same_rows(lambda x, a=activation: matmul(x, weight, a), x)


@pytest.mark.parametrize("width", [24, 64, 100, 256, 1000])
def test_norm(width: int) -> None:
    rng = np.random.default_rng(width)
    x = jnp.asarray(rng.normal(size=(33, width)), jnp.float32)
    scale = jnp.asarray(rng.normal(size=width), jnp.float32)
    _same_rows(lambda x: rms_norm(x, scale, 1e-5), x)


@pytest.mark.parametrize("window", [None, 50])
def test_attention_ignores_neighbours_and_capacity(window: int | None) -> None:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(3, 9, 4, 24)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(3, 384, 2, 24)), jnp.float32) for _ in range(2))
    lengths = jnp.array([5, 130, 260], jnp.int32)
    positions = lengths[:, None] + jnp.arange(9)

    def run(rows: slice, t: int, slots: int) -> np.ndarray:
        cache = k[rows, :slots], v[rows, :slots]
        at = lengths[rows], positions[rows, :t], None
        return np.asarray(attention(q[rows, :t], *cache, *at, window=window, head_scale=0.2))

    whole = run(slice(0, 3), 9, 384)
    for row, slots in ((0, 128), (1, 256), (2, 384)):
        for t in (1, 2, 8):
            alone = run(slice(row, row + 1), t, slots)
            np.testing.assert_array_equal(alone[0], whole[row, :t])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize(("bits", "hadamard"), [(16, False), (8, False), (4, True)])
@pytest.mark.covering(1)
def test_forward_in_pieces(dtype: str, activation: str, bits: int, hadamard: bool) -> None:
    """Nine tokens in one pass, in pieces and alone: the same logits and the same cache."""
    config = dataclasses.replace(CONFIG, dtype=dtype, hadamard=hadamard)
    params = quantized_model(config)
    rng = np.random.default_rng(1)
    run = jax.jit(forward, static_argnames="activation")
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (3, 29)))
    context = jnp.array([3, 20, 11], jnp.int32)
    cache = KVCache.create(config, 3, 64, bits)
    _, cache = run(params, tokens[:, :20], jnp.broadcast_to(jnp.arange(20), (3, 20)), cache)
    cache = cache.with_lengths(context)

    def advance(cache: KVCache, piece: jax.Array) -> tuple[jax.Array, KVCache]:
        positions = cache.lengths[:, None] + jnp.arange(piece.shape[1])
        logits, cache = run(params, piece, positions, cache, activation=activation)
        return logits, cache.with_lengths(cache.lengths + piece.shape[1])

    new = tokens[:, 20:]
    whole, whole_cache = advance(cache, new)
    for cuts in ([1] * 9, [4, 5], [8, 1]):
        pieces, piece_cache, begin = [], cache, 0
        for cut in cuts:
            logits, piece_cache = advance(piece_cache, new[:, begin : begin + cut])
            pieces.append(logits)
            begin += cut
        np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)
        jax.tree.map(np.testing.assert_array_equal, piece_cache, whole_cache)

    row = jax.tree.map(lambda leaf: leaf[1:2], cache)
    alone, _ = advance(row, new[1:2])
    np.testing.assert_array_equal(alone[0], whole[1])


def test_unquantized_forward_is_invariant_too() -> None:
    params = random_model()
    cache = KVCache.create(CONFIG, 2, 32)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, CONFIG.vocab_size, (2, 8)))
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    whole, _ = jax.jit(forward)(params, tokens, positions, cache)
    alone, _ = jax.jit(forward)(
        params, tokens[1:, :3], positions[1:, :3], jax.tree.map(lambda leaf: leaf[1:], cache)
    )
    np.testing.assert_array_equal(alone[0], whole[1, :3])
