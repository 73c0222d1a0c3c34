"""QuaRot's rotations change no model's function and reduce its quantization error."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.loading import load
from checkpoints_tools.quantization import quantize
from checkpoints_tools.quantization.layerwise import quantize_layers, quantized_config
from checkpoints_tools.quantization.quarot import random_signs
from checkpoints_tools.quantization.recipe import Recipe
from pallas_kernels.formats import plain_weight
from pallas_kernels.weight_values import plain_values
from specjax.model.kv_cache import KVCache
from specjax.model.layers import LINEARS, Layer, Linear
from specjax.model.params import Params
from specjax.model.transformer import forward
from specjax.model.weight_names import named_weights, params_from_weights
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, random_model, random_prompts

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FAMILIES = sorted(file.parent.name for file in GOLDEN.glob("*/golden.npz"))
TOLERANCE = 1e-4  # absolute, for logits up to 10; relative to the largest one beyond that
# Grouped queries throughout; sizes that are powers of two, 12 · 2^k, 172, and such that only blocks
# fit: 3 heads, 14 heads, 50 = 2 · 25 hidden features.
SHAPES = {
    "random": {},
    "powers of two": {"hidden_size": 128, "intermediate_size": 256, "num_heads": 8, "head_dim": 16},
    "14 heads": {"num_heads": 14, "num_kv_heads": 2, "head_dim": 12},
    "blocks": {"hidden_size": 50, "intermediate_size": 90, "num_heads": 3, "num_kv_heads": 1},
}


class Unrounded(Recipe):
    """A recipe that transforms weights and does not round them."""

    def round(self, name: str, weight: jax.Array, statistics: Any = None) -> jax.Array:
        return weight


def rotate(params: Params) -> Params:
    """The rotated model, not quantized, in the model's own dtype."""
    recipe = Unrounded("quarot")
    config = quantized_config(params.config, recipe, lm_head=False)
    weights = quantize_layers(named_weights(params).items(), params.config, recipe)
    return params_from_weights(config, dict(weights))


def logits(params: Params, activation: str = "a16", cache_bits: int = 16) -> np.ndarray:
    """Logits of random tokens, f32[B, T, V]."""
    config = params.config
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 24))
    positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
    cache = KVCache.create(config, *tokens.shape, bits=cache_bits)
    run = jax.jit(forward, static_argnames="activation")
    return np.asarray(run(params, tokens, positions, cache, activation=activation)[0])


def check_same_function(params: Params) -> None:
    expected, found = logits(params), logits(rotate(params))
    tolerance = TOLERANCE * max(1, np.abs(expected).max() / 10)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def with_random_norms_and_biases(params: Params) -> Params:
    """Golden models have norm scales of one and biases of zero, which no mistake would change."""
    rng = np.random.default_rng(2)

    def vector(leaf: jax.Array) -> jax.Array:
        return leaf + jnp.asarray(rng.uniform(-0.5, 0.5, leaf.shape), leaf.dtype)

    return jax.tree.map(lambda leaf: vector(leaf) if leaf.ndim == 1 else leaf, params)


@pytest.mark.parametrize("name", representatives(FAMILIES, "llama_bias", "qwen3"))
def test_families(name: str) -> None:
    check_same_function(with_random_norms_and_biases(load(GOLDEN / name)))


@pytest.mark.parametrize("shape", representatives(SHAPES, "14 heads", "blocks"))
def test_shapes(shape: str) -> None:
    params = random_model(dataclasses.replace(CONFIG, **SHAPES[shape]))
    check_same_function(with_random_norms_and_biases(params))


def test_every_matrix_changes_and_norms_become_ones() -> None:
    params = random_model()
    rotated = rotate(params)
    assert rotated.config == dataclasses.replace(CONFIG, hadamard=True)
    for before, after in zip(params.layers, rotated.layers, strict=True):
        for name in LINEARS:
            a, b = (plain_values(getattr(layer, name).weight) for layer in (before, after))
            assert np.abs(a - b).max() > 0.1
            np.testing.assert_allclose(jnp.linalg.norm(b, axis=None), norm_of(before, name), 1e-5)
        assert (after.attention_norm == 1).all() and (after.mlp_norm == 1).all()


def norm_of(layer: Layer, name: str) -> float:
    """The Frobenius norm of a matrix with its norm's scale folded in, which no rotation changes."""
    scales = dict.fromkeys("qkv", layer.attention_norm)
    scales |= dict.fromkeys(("gate", "up"), layer.mlp_norm)
    return jnp.linalg.norm(plain_values(getattr(layer, name).weight) * scales.get(name, 1.0))


def test_dtype_is_kept_and_tied_embeddings_are_untied() -> None:
    config = dataclasses.replace(CONFIG, dtype="bfloat16", tie_word_embeddings=True)
    params = dataclasses.replace(random_model(config), lm_head=None)
    rotated = quantize(params, "quarot")
    assert not rotated.config.tie_word_embeddings
    assert rotated.embedding.bits.dtype == rotated.head.weight.bits.dtype == jnp.uint16
    assert rotated.final_norm.dtype == rotated.layers[0].mlp_norm.dtype == jnp.bfloat16


def test_signs() -> None:
    signs = np.asarray(random_signs(CONFIG, 0))
    assert set(signs) == {-1, 1}
    np.testing.assert_array_equal(random_signs(CONFIG, 0), signs)
    assert np.any(random_signs(CONFIG, 1) != signs)


def test_what_cannot_be_rotated() -> None:
    with pytest.raises(ValueError, match="rotated already"):
        quantize(rotate(random_model()), "quarot")
    with pytest.raises(ValueError, match="quantized already"):
        quantize(quantize(random_model(), "rtn"), "quarot")


def test_checkpoints_keep_the_rotation(tmp_path: Path) -> None:
    params = quantize(random_model(), "quarot")
    specjax.save(params, tmp_path / "rotated")
    read = load(tmp_path / "rotated")
    assert read.config.hadamard
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.exhaustive
@pytest.mark.recompiled
@pytest.mark.parametrize(
    ("dtype", "activation", "cache_bits"),
    representatives(
        [
            ("float32", "a8", 16),
            ("bfloat16", "a4", 16),
            ("float32", "a4", 4),
            ("bfloat16", "a8", 8),
        ],
        ("float32", "a4", 4),
    ),
)
def test_drafting_does_not_change_greedy_output(
    dtype: str, activation: str, cache_bits: int
) -> None:
    config = dataclasses.replace(CONFIG, dtype=dtype)
    params = quantize(random_model(config), "quarot")
    prompts = random_prompts((3, 17, 40), config.vocab_size)
    plain, drafted = (
        specjax.decode(params, prompts, max_new_tokens=60, drafter=drafter, cache_bits=cache_bits)
        for drafter in (specjax.Autoregressive(), specjax.QSpec(activation=activation))
    )
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert 0 < float(drafted.stats.acceptance_rate) < 1, "a case that tests nothing"


def test_a_quantized_cache_holds_rotated_keys_better() -> None:
    """Scales two features of every key by 30, and the same features of the queries by 1 / 30."""
    params, half = random_model(), CONFIG.head_dim // 2

    def scaled(linear: Linear, factor: float) -> Linear:
        rows = linear.weight.reshape(-1, CONFIG.head_dim, CONFIG.hidden_size)
        rows = rows.at[:, jnp.array([3, 3 + half])].mul(factor)  # a pair that RoPE turns
        return Linear(rows.reshape(linear.weight.shape))

    layers = tuple(
        dataclasses.replace(layer, q=scaled(layer.q, 1 / 30), k=scaled(layer.k, 30))
        for layer in params.layers
    )
    params = dataclasses.replace(params, layers=layers)
    expected = logits(params)

    def error(params: Params) -> float:
        return float(np.square(logits(params, cache_bits=8) - expected).mean())

    assert error(rotate(params)) < 0.5 * error(params)


def test_outliers_no_longer_ruin_4_bit_activations() -> None:
    """Two features a hundred times as large as the rest: rounding to 4 bits errs less rotated."""
    params = random_model()
    columns = jnp.array([5, 40])
    embedding = params.embedding.at[:, columns].mul(100)
    outlying = dataclasses.replace(params, embedding=plain_weight(embedding))
    expected = logits(outlying)

    def error(method: str) -> float:
        return float(np.square(logits(quantize(outlying, method), "a4") - expected).mean())

    assert error("quarot") < 0.5 * error("rtn")


# The authors' clip of activations, for "a4" alone, is a field of every 4-bit weight.
@pytest.mark.parametrize(
    ("method", "ratio"),
    representatives(
        [("quarot", 0.9), ("quarot+gptq", 0.9), ("rtn", 1)], ("quarot", 0.9), ("rtn", 1)
    ),
)
def test_activation_clip(method: str, ratio: float) -> None:
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 24))
    calibration = tokens if Recipe(method).needs_calibration else None
    quantized = quantize(random_model(), method, lm_head=True, calibration=calibration)
    for linear in (*quantized.linears(), quantized.head):
        assert linear.weight.activation_clip == ratio
