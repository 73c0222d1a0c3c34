"""Quantized KV caches: what an entry stands for, and that output stays exact."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from pallas_kernels import attention_reference, cpu
from pallas_kernels.attention import attention
from pallas_kernels.cache_entries import empty_entries, write_entries
from pallas_kernels.cpu.native import instruction_sets
from specjax.model.kv_cache import KVCache
from tests.support.compiled import dequantize_entries, forward, quantize_entries
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_prompts

BITS = (8, 4)


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# An entry errs by at most half a step of its head's own grid, and zero is exact.
@pytest.mark.parametrize("bits", BITS)
def test_entries_by_the_equation(bits) -> None:
    x = _normal(3, 5, 2, 36).at[0, 0, 0].add(3).at[0, 1].set(0).at[1, 2, 1, 7].set(0)
    entries = quantize_entries(x, bits)
    assert entries.shape == x.shape
    values = np.asarray(dequantize_entries(entries))
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    step = (high - low) / (2**bits - 1)
    np.testing.assert_allclose(entries.scales, step, rtol=1e-6)
    # The zero is rounded too, so that values at the ends may err by half a step more.
    assert (np.abs(values - x) <= step[..., None] * 1.0001).all()
    assert (np.abs(values - x) <= step[..., None] * 0.5001).mean() > 0.9
    assert values[1, 2, 1, 7] == 0 and not values[0, 1].any()
    assert entries.codes.size == x.size * bits // 8


@pytest.mark.parametrize("bits", BITS)
def test_writing_touches_its_slots_alone(bits) -> None:
    entries = empty_entries((2, 3, 8, 1, 4), "float32", bits)
    new = _normal(2, 3, 1, 4)
    rows, slots = jnp.arange(2)[:, None], jnp.array([[0, 1, 2], [6, 7, 8]])
    values = np.asarray(dequantize_entries(write_entries(entries, rows, 1, slots, new)))
    expected = np.zeros((2, 3, 8, 1, 4), np.float32)
    rounded = np.asarray(dequantize_entries(quantize_entries(new, bits)))
    expected[0, 1, :3], expected[1, 1, 6:] = rounded[0], rounded[1, :2]  # slot 8 does not exist
    np.testing.assert_array_equal(values, expected)


def _case(bits: int, e: int) -> tuple:
    b, t, h, k, s = 2, 3, 4, 2, 512
    keys, values = (quantize_entries(_normal(b, s, k, e, seed=i), bits) for i in (1, 2))
    lengths = jnp.array([5, 400], jnp.int32)
    positions = lengths[:, None] + jnp.arange(t)
    ancestors = jnp.array([[[0, -1, -1], [0, 1, -1], [0, 1, 2]]] * b, jnp.int32)
    return _normal(b, t, h, e), keys, values, lengths, positions, ancestors


# Attention over codes is attention over the values that they stand for.
@pytest.mark.parametrize("implementation", ["reference", *instruction_sets()])
@pytest.mark.parametrize("e", [16, 36, 64, 128])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.covering(1)
def test_attention_reads_what_entries_stand_for(bits, e, implementation) -> None:
    queries, keys, values, *others = _case(bits, e)

    def attend(keys, values, ancestors):
        options = {"window": None, "head_scale": e**-0.5}
        if implementation == "reference":
            kernel = jax.jit(attention_reference.attention, static_argnames=tuple(options))
        else:
            options["instruction_set"] = implementation
            kernel = cpu.attention
        keys, values = jax.tree.map(lambda part: part[:, None], (keys, values))  # of one layer
        layer = jnp.int32(0)
        return np.asarray(kernel(queries, keys, values, *others[:2], ancestors, layer, **options))

    plain = attend(dequantize_entries(keys), dequantize_entries(values), others[2])
    for ancestors in (others[2], None):
        np.testing.assert_allclose(attend(keys, values, ancestors), plain, rtol=2e-5, atol=2e-6)


def test_attention_over_codes_under_vmap() -> None:
    queries, keys, values, lengths, positions, ancestors = _case(4, 16)
    attend = lambda *operands: attention(*operands, window=None, head_scale=0.25)  # noqa: E731
    operands = (queries, keys, values, lengths, positions, ancestors)
    single = attend(*operands)
    twice = jax.tree.map(lambda x: jnp.stack((x, x)), operands)
    for y in jax.vmap(attend)(*twice):
        np.testing.assert_array_equal(y, single)


# The promise of the library for every cache precision: drafts change nothing.
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("bits", "activation"), representatives(list(product(BITS, ("a8", "a4"))), (8, "a8"))
)
def test_output_is_that_of_plain_decoding(bits, activation) -> None:
    params, prompts = quantized_model(group_size=32), random_prompts((5, 17), CONFIG.vocab_size)
    options = {"max_new_tokens": 24, "cache_bits": bits, "stop_tokens": ()}
    plain = specjax.decode(params, prompts, drafter=specjax.Autoregressive(), **options)
    drafter = specjax.QSpec(draft_length=3, activation=activation)
    drafted = specjax.decode(params, prompts, drafter=drafter, **options)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    rounds = np.asarray(drafted.stats.rounds)
    assert (rounds < 24).all(), "nothing was accepted"


def test_size_and_precision_fall_together() -> None:
    params, tokens = specjax.load("tiny"), jnp.arange(40)[None] + 300
    logits, held = {}, {}
    for bits in (16, *BITS):
        cache = KVCache.create(params.config, 1, 64, bits)
        assert cache.bits == bits
        held[bits] = sum(part.nbytes for part in jax.tree.leaves((cache.keys, cache.values)))
        logits[bits], _ = forward(params, tokens, jnp.arange(40)[None], cache)
    # Heads of 64: 128 bytes in bfloat16; 64 or 32 bytes of codes, and five of scale and zero.
    assert held[8] * 128 == held[16] * 69 and held[4] * 128 == held[16] * 37
    errors = {bits: float(jnp.abs(logits[bits] - logits[16]).mean()) for bits in BITS}
    assert 0 < errors[8] < errors[4] / 4


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache_bits must be one of \(16, 8, 4\), got 3"):
        specjax.decode(specjax.load("tiny"), [1, 2], cache_bits=3)
