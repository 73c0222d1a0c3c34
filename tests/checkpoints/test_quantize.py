"""Packing is lossless, and the error of round-to-nearest is at most half a scale."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from checkpoints_tools.loading import load, load_tokenizer
from checkpoints_tools.quantization import quantize
from checkpoints_tools.quantization.calibration import calibration_tokens
from checkpoints_tools.quantization.recipe import Recipe
from checkpoints_tools.quantization.rtn import round_clipped, round_to_nearest
from pallas_kernels import formats, weight_values
from pallas_kernels.formats import (
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    int4_from_integers,
    padded_inputs,
)
from pallas_kernels.interleave import by_rows
from specjax.model.kv_cache import KVCache
from specjax.model.layers import LINEARS, Linear
from specjax.model.params import Params
from tests.conftest import ROOT
from tests.support.compiled import forward
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, random_model

GROUP_SIZES = (32, 64, 128, None)
# Few shapes, because each compiles once: one group, tails of every kind, more than one block.
SHAPES = ((1, 1), (3, 172), (2, 256), (5, 300))
few = settings(max_examples=40, deadline=None)

pack, unpack, dequantize = (
    jax.jit(function) for function in (formats.pack, formats.unpack, weight_values.dequantize)
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


# The range is symmetric, -7 … 7, so -w quantizes to the negated integers.
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


# Quantizing a dequantized weight gives the same integers and scales.
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
        np.testing.assert_array_equal(after.attention_norm, before.attention_norm)
        np.testing.assert_array_equal(after.mlp_norm, before.mlp_norm)
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
    np.testing.assert_array_equal(quantized.layers[1].q.bias, bias)
    np.testing.assert_array_equal(quantized.layers[1].v.bias, narrow)


def test_quantize_head(model: Params) -> None:
    quantized = quantize(model, lm_head=True)
    assert quantized.lm_head is not None and isinstance(quantized.lm_head.weight, Int4Weight)
    assert quantized.embedding is model.embedding


# A tied model's head becomes a quantized copy of its embedding; look-ups keep the original.
def test_quantize_tied_head(model: Params) -> None:
    quantized = quantize(tied(model), lm_head=True)
    assert not quantized.config.tie_word_embeddings
    assert quantized.embedding is model.embedding
    assert quantized.lm_head is not None
    expected = round_to_nearest(model.embedding)
    np.testing.assert_array_equal(by_rows(quantized.lm_head.weight).packed, expected.packed)
    untouched = quantize(tied(model))
    assert untouched.lm_head is None and untouched.config.tie_word_embeddings


METHODS = {
    "rtn": Int4Weight, "rtn-clip": Int4Weight, "int8": Int8Weight, "mxfp4": Mxfp4Weight,
    "mxfp4-even": Mxfp4Weight, "gptq": Int4Weight, "gptq-clip": Int4Weight,
    "act-order+gptq": Int4Weight, "act-order+gptq-clip": Int4Weight,
    "awq": Int4Weight, "awq+gptq": Int4Weight, "awq+mxfp4": Mxfp4Weight,
    "quarot": Int4Weight, "quarot+gptq": Int4Weight,
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 32))


def logits(params: Params) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    cache = KVCache.create(params.config, *TOKENS.shape)
    return np.asarray(forward(params, jnp.asarray(TOKENS), positions, cache)[0])


# Every method gives its format to every linear layer and the head. The model's output stays as
# close as 4 bits of random weights allow; after a wrong scale or rotation it would be unrelated.
@pytest.mark.parametrize("method", representatives(METHODS, "rtn", "mxfp4", "awq+gptq", "quarot"))
def test_methods(model: Params, method: str) -> None:
    calibration = TOKENS if Recipe(method).needs_calibration else None
    quantized = quantize(model, method, lm_head=True, calibration=calibration)
    for linear in (*quantized.linears(), quantized.head):
        assert isinstance(linear.weight, METHODS[method])
    assert quantized.config.hadamard == ("quarot" in method)
    before, after = logits(model), logits(quantized)
    correlation = np.corrcoef(before.ravel(), after.ravel())[0, 1]
    assert 0.8 < correlation < 1


# Weights of 3 and 2 bits are integers of at most 3 and 1 in 4-bit storage.
@pytest.mark.parametrize(("bits", "limit"), [(3, 3), (2, 1)])
@pytest.mark.parametrize("method", ["rtn", "rtn-clip", "gptq"])
@pytest.mark.covering(1)
def test_fewer_bits(model: Params, method: str, bits: int, limit: int) -> None:
    calibration = TOKENS if method == "gptq" else None
    weight = quantize(model, method, bits=bits, calibration=calibration).layers[0].up.weight
    assert isinstance(weight, Int4Weight)
    assert np.abs(np.asarray(unpack(by_rows(weight).packed))).max() == limit
    assert weight.nbytes == quantize(model).layers[0].up.weight.nbytes


# With 8 bits, the error is at most half a step of 127.
def test_int8_error_bound() -> None:
    w = jax.random.normal(jax.random.key(0), (16, 300))
    weight = round_to_nearest(w, 64, bits=8)
    scale = np.repeat(np.asarray(weight.scales, np.float32), 64, axis=1)[:, :300]
    assert np.all(np.abs(np.asarray(dequantize(weight)) - w) <= scale * (0.5 + 1e-5))
    np.testing.assert_allclose(scale.max(), np.abs(w).max() / 127, rtol=2**-7)


# The searched ratio is the best of its grid for every group, in its own norm.
@pytest.mark.parametrize("bits", [4, 2])
def test_clip_is_the_best_of_all(bits: int) -> None:
    w = np.random.default_rng(0).standard_t(3, size=(4, 96)).astype(np.float32)

    def errors(weight: Int4Weight) -> np.ndarray:
        difference = np.abs(w - np.asarray(dequantize(weight))).astype(np.float64)
        return np.sum(difference.reshape(4, 3, 32) ** 2.4, axis=-1)

    candidates = [
        errors(round_to_nearest(jnp.asarray(w), 32, bits=bits, ratio=1 - i / 100))
        for i in range(80)
    ]
    found = errors(round_clipped(jnp.asarray(w), 32, bits=bits))
    np.testing.assert_allclose(found, np.min(candidates, axis=0), rtol=1e-4)
    assert (found <= candidates[0]).all() and np.mean(found < candidates[0]) > 0.5


def library_text(package: str) -> str:
    """The library's own source. The shipped model was trained on Python."""
    return "\n".join(file.read_text() for file in sorted((ROOT / package).glob("*.py")))


# On the shipped model's real weights and text that it was not calibrated on, the error of the
# output, as divergence of the predicted tokens, falls as the papers say: the methods that look at
# activations err less than rounding to nearest.
@pytest.mark.exhaustive
def test_order_on_real_weights() -> None:
    params, tokenizer = load("tiny-16bit"), load_tokenizer("tiny-16bit")
    tokens, unseen = (
        calibration_tokens(library_text(package), tokenizer, sequences=8, length=128)
        for package in ("specjax", "pallas_kernels")
    )

    @jax.jit
    def predicted(params: Params) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(unseen.shape[1]), unseen.shape)
        cache = KVCache.create(params.config, *unseen.shape)
        return jax.nn.log_softmax(forward(params, jnp.asarray(unseen), positions, cache)[0])

    exact = predicted(params)

    def divergence(method: str) -> float:
        calibration = tokens if Recipe(method).needs_calibration else None
        rounded = predicted(quantize(params, method, calibration=calibration))
        return float(jnp.mean(jnp.sum(jnp.exp(exact) * (exact - rounded), axis=-1)))

    nearest = divergence("rtn")
    assert divergence("gptq") < nearest
    assert divergence("awq") < nearest
    assert divergence("int8") < nearest / 20


def test_quantize_refusals(model: Params) -> None:
    for options, message in (
        ({"method": "gguf"}, "method must be one of rtn, rtn-clip, gptq, gptq-clip, int8"),
        ({"method": "gptq+rtn"}, "got 'gptq+rtn'"),
        ({"method": "awq+quarot"}, "in this order, or bfloat12 or nested16, got 'awq+quarot'"),
        ({"method": ""}, "got ''"),
        ({"method": "act-order+rtn"}, "act-order goes with gptq only"),
        ({"group_size": 48}, "group_size must be 32, 64, 128 or None"),
        ({"method": "mxfp4", "group_size": 64}, "mxfp4 has groups of 32"),
        ({"bits": 5}, "bits must be 4, 3 or 2, got 5"),
        ({"method": "int8", "bits": 3}, "int8 fixes its bits; leave bits out, got 3"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            quantize(model, **options)
    with pytest.raises(ValueError, match=r"layers\.0\.q\.weight is quantized already"):
        quantize(quantize(model))
    assert model.config == CONFIG
