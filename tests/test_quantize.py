"""Packing loses nothing, and round-to-nearest loses what its scale allows and no more."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from checkpoints_tools.quantize import quantize
from checkpoints_tools.quantize.rtn import round_to_nearest
from pallas_kernels import formats
from pallas_kernels.formats import Int4Weight, int4_from_integers, padded_inputs
from specjax.params import LINEARS, Linear, Params
from tests.random_models import CONFIG, random_model

GROUP_SIZES = (32, 64, 128, None)
# Few shapes, because each compiles once: one group, tails of every kind, more than one block.
SHAPES = ((1, 1), (3, 172), (2, 256), (5, 300))
few = settings(max_examples=40, deadline=None)

pack, unpack, dequantize = (
    jax.jit(function) for function in (formats.pack, formats.unpack, formats.dequantize)
)

shapes = st.sampled_from(SHAPES)
group_sizes = st.sampled_from(GROUP_SIZES)
integers = shapes.flatmap(lambda shape: hnp.arrays(np.int8, shape, elements=st.integers(-8, 7)))
magnitudes = st.floats(-1e6, 1e6, width=32).map(lambda x: 0.0 if abs(x) < 1e-30 else x)
matrices = shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=magnitudes))


def scale_per_weight(weight: Int4Weight) -> np.ndarray:
    """The scale that each weight has: f32[N, K]."""
    k = weight.shape[1]
    size = weight.group_size or padded_inputs(k)
    return np.repeat(np.asarray(weight.scales, np.float32), size, axis=1)[:, :k]


# unpack(pack(q)) is q, and the padding is zero.
@few
@given(integers)
def test_pack_round_trip(q: np.ndarray) -> None:
    n, k = q.shape
    unpacked = np.asarray(unpack(pack(jnp.asarray(q))))
    assert unpacked.shape == (n, padded_inputs(k))
    np.testing.assert_array_equal(unpacked[:, :k], q)
    assert not unpacked[:, k:].any()


# Byte r of a block holds k = r in its low nibble and k = r + 128 in its high one.
def test_packed_layout() -> None:
    q = np.zeros((1, 512), np.int8)
    q[0, [3, 131, 259]] = 5, -2, 7
    packed = np.asarray(pack(jnp.asarray(q)))
    assert packed.shape == (1, 256)
    assert packed[0, 3] == 0x5 | (-2 & 0xF) << 4
    assert packed[0, 128 + 3] == 0x7
    assert np.count_nonzero(packed) == 2


# dequantize gives q · scale of the weight's own group, exactly.
@few
@given(integers, group_sizes, st.integers(0, 2**32 - 1))
def test_dequantize(q: np.ndarray, group_size: int | None, seed: int) -> None:
    n, k = q.shape
    groups = 1 if group_size is None else -(-k // group_size)
    scales = np.random.default_rng(seed).uniform(0.1, 2.0, (n, groups)).astype(jnp.bfloat16)
    weight = int4_from_integers(jnp.asarray(q), jnp.asarray(scales), group_size)
    wide = np.repeat(scales.astype(np.float32), group_size or k, axis=1)[:, :k]
    np.testing.assert_array_equal(dequantize(weight), q * wide)


# |w - q · s| <= s / 2 for the scale as stored: nothing is clipped or rounded the wrong way.
@few
@given(matrices, group_sizes)
def test_rtn_error_bound(w: np.ndarray, group_size: int | None) -> None:
    weight = round_to_nearest(jnp.asarray(w), group_size)
    assert weight.scales.dtype == jnp.bfloat16
    assert weight.shape == w.shape
    error = np.abs(np.asarray(dequantize(weight)) - w)
    assert np.all(error <= scale_per_weight(weight) * (0.5 + 1e-5))


# Every group's scale is its own largest magnitude / 7 to bf16's precision, tails included.
@few
@given(matrices, group_sizes)
def test_rtn_scale(w: np.ndarray, group_size: int | None) -> None:
    weight = round_to_nearest(jnp.asarray(w), group_size)
    k = w.shape[1]
    size = group_size or k
    padded = np.pad(np.abs(w), ((0, 0), (0, -k % size)))
    largest = padded.reshape(len(w), -1, size).max(axis=-1)
    scales = np.asarray(weight.scales, np.float32)
    groups = largest.shape[1]
    np.testing.assert_allclose(scales[:, :groups], largest / 7, rtol=2**-8)
    assert not scales[:, groups:].any()


# The range is symmetric, -7 … 7, and so -w quantizes to the negated integers.
@few
@given(matrices)
def test_rtn_is_symmetric(w: np.ndarray) -> None:
    plus, minus = (unpack(round_to_nearest(jnp.asarray(x)).packed) for x in (w, -w))
    np.testing.assert_array_equal(plus, -np.asarray(minus))
    assert np.abs(np.asarray(plus)).max() <= 7


# Zeros, and values too small to have a scale, become zeros and disturb no other group.
def test_rtn_zero_groups() -> None:
    w = np.zeros((2, 300), np.float32)
    w[0, 128:256] = np.linspace(-1, 1, 128)
    w[1, 0] = 1e-45
    restored = np.asarray(dequantize(round_to_nearest(jnp.asarray(w))))
    assert np.isfinite(restored).all()
    assert not restored[0, :128].any() and not restored[0, 256:].any() and not restored[1].any()
    np.testing.assert_allclose(restored[0, 128:256], w[0, 128:256], atol=1 / 14 + 1e-3)


# What is representable survives: quantizing the dequantized gives the same integers and scales.
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rtn_is_idempotent(group_size: int | None) -> None:
    w = jax.random.normal(jax.random.key(0), (16, 300))
    once = round_to_nearest(w, group_size)
    twice = round_to_nearest(dequantize(once), group_size)
    np.testing.assert_array_equal(once.packed, twice.packed)
    np.testing.assert_array_equal(once.scales, twice.scales)


@pytest.fixture(scope="module")
def model() -> Params:
    return random_model()


def tied(params: Params) -> Params:
    config = dataclasses.replace(params.config, tie_word_embeddings=True)
    return dataclasses.replace(params, lm_head=None, config=config)


# Only the blocks' linear layers change; everything else is the argument's own array.
def test_quantize_shares_the_rest(model: Params) -> None:
    quantized = quantize(model, "rtn", group_size=64)
    assert quantized.config == model.config
    assert quantized.embedding is model.embedding
    assert quantized.final_norm is model.final_norm
    assert quantized.lm_head is not None and quantized.lm_head.weight is model.lm_head.weight
    for before, after in zip(model.layers, quantized.layers, strict=True):
        assert after.attention_norm is before.attention_norm
        assert after.mlp_norm is before.mlp_norm
        for name in LINEARS:
            weight = getattr(after, name).weight
            assert isinstance(weight, Int4Weight) and weight.group_size == 64
            assert weight.shape == getattr(before, name).weight.shape


def test_quantize_keeps_biases(model: Params) -> None:
    config = dataclasses.replace(model.config, qkv_bias=True)
    bias = jnp.ones(config.num_heads * config.head_dim)
    narrow = jnp.ones(config.num_kv_heads * config.head_dim)
    layers = tuple(
        dataclasses.replace(
            layer,
            q=Linear(layer.q.weight, bias),
            k=Linear(layer.k.weight, narrow),
            v=Linear(layer.v.weight, narrow),
        )
        for layer in model.layers
    )
    quantized = quantize(dataclasses.replace(model, layers=layers, config=config))
    assert quantized.layers[1].q.bias is bias
    assert quantized.layers[1].v.bias is narrow


def test_quantize_head(model: Params) -> None:
    quantized = quantize(model, lm_head=True)
    assert quantized.lm_head is not None and isinstance(quantized.lm_head.weight, Int4Weight)
    assert quantized.embedding is model.embedding


# A tied model's head becomes a quantized copy of its embedding, which stays for look-ups.
def test_quantize_tied_head(model: Params) -> None:
    quantized = quantize(tied(model), lm_head=True)
    assert not quantized.config.tie_word_embeddings
    assert quantized.embedding is model.embedding
    assert quantized.lm_head is not None
    expected = round_to_nearest(model.embedding)
    np.testing.assert_array_equal(quantized.lm_head.weight.packed, expected.packed)
    untouched = quantize(tied(model))
    assert untouched.lm_head is None and untouched.config.tie_word_embeddings


def test_quantize_refusals(model: Params) -> None:
    for options, message in (
        ({"method": "gguf"}, "method must be one of rtn, got 'gguf'"),
        ({"group_size": 48}, "group_size must be 32, 64, 128 or None"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(model, **options)
    with pytest.raises(ValueError, match=r"layers\.0\.q\.weight is quantized already"):
        quantize(quantize(model))
    assert model.config == CONFIG
