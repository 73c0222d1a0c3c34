"""AWQ's scales leave the function as it is, and its searches find what an exhaustive one finds."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools.quantization import calibration
from checkpoints_tools.quantization.awq import (
    RATIOS,
    errors_of_ratios,
    scale_layer,
    scales_of_ratio,
)
from checkpoints_tools.quantization.calibration import InputStatistics, LayerStatistics
from checkpoints_tools.quantization.rtn import OUTPUT_RATIOS, round_clipped, round_to_nearest
from specjax.model.config import ModelConfig
from specjax.model.layers import Layer, Linear
from tests.support.compiled import dequantize
from tests.support.random_models import CONFIG, random_model


def inputs_of(k: int, tokens: int = 64) -> np.ndarray:
    """f32[tokens, K]: a few inputs are much larger than the others, as in real models."""
    rng = np.random.default_rng(k)
    return (rng.normal(size=(tokens, k)) * np.exp(rng.normal(size=k))).astype(np.float32)


def statistics_of(x: np.ndarray) -> InputStatistics:
    return InputStatistics(jnp.asarray(x.T @ x / len(x)), jnp.asarray(np.abs(x).mean(axis=0)))


# The errors of all ratios equal the output errors on the inputs themselves, in order too.
def test_ratio_is_the_best_of_all() -> None:
    x = inputs_of(96)
    w = np.random.default_rng(0).normal(size=(24, 96)).astype(np.float32)
    rounding = partial(round_to_nearest, group_size=32)
    errors = errors_of_ratios(jnp.asarray(w), statistics_of(x), rounding)
    searched = []
    for ratio in RATIOS:
        s = np.maximum(np.abs(x).mean(axis=0) ** ratio, 1e-4)
        s /= np.sqrt(s.max() * s.min())
        rounded = np.asarray(dequantize(rounding(jnp.asarray(w * s)))) / s
        searched.append(np.mean(np.sum((x @ (w - rounded).T) ** 2, axis=1)))
    np.testing.assert_allclose(errors, searched, rtol=1e-3)
    assert np.argmin(errors) == np.argmin(searched) > 0


# Every group's clip ratio is the best of the ten: never worse than no clipping, in its own measure.
@pytest.mark.parametrize("group_size", [32, None])
def test_clip_is_the_best_of_all(group_size: int | None) -> None:
    k = 80
    x, w = inputs_of(k), np.random.default_rng(1).standard_t(3, size=(6, k)).astype(np.float32)
    moment = statistics_of(x).second_moment
    weight = round_clipped(jnp.asarray(w), group_size, second_moment=moment)
    candidates = [round_to_nearest(jnp.asarray(w), group_size, ratio=r) for r in OUTPUT_RATIOS]

    def errors(candidate: object) -> np.ndarray:  # of every row and group
        difference = w - np.asarray(dequantize(candidate))
        size = group_size or k
        parts = [slice(start, start + size) for start in range(0, k, size)]
        return np.stack([np.mean((x[:, p] @ difference[:, p].T) ** 2, axis=0) for p in parts])

    best = np.min([errors(candidate) for candidate in candidates], axis=0)
    np.testing.assert_allclose(errors(weight), best, rtol=1e-4)
    assert np.mean(best < errors(candidates[0])) > 0.2


def layer_and_statistics(config: ModelConfig) -> tuple[Layer, LayerStatistics, jax.Array]:
    """A layer with every bias, hidden states, and the statistics of its inputs there."""
    rng = np.random.default_rng(2)
    layer = random_model(config).layers[0]
    biased = {
        name: Linear(
            linear.weight, jnp.asarray(rng.normal(size=linear.weight.shape[0]), jnp.float32)
        )
        for name in ("q", "k", "v", "o", "gate", "up", "down")
        for linear in (getattr(layer, name),)
    }
    layer = dataclasses.replace(layer, **biased)
    spread = np.exp(rng.normal(size=config.hidden_size))
    hidden = jnp.asarray(rng.normal(size=(2, 24, config.hidden_size)) * spread, jnp.float32)
    return layer, calibration.observe(layer, hidden, 0, config, lambda: None), hidden


MULTI_HEAD = dataclasses.replace(CONFIG, num_kv_heads=CONFIG.num_heads, head_dim=16)
ROTATED = dataclasses.replace(MULTI_HEAD, hadamard=True)


# The scaled layer computes the same, and its inputs have the statistics that are returned.
@pytest.mark.parametrize(
    "config", [CONFIG, MULTI_HEAD, ROTATED], ids=["grouped", "multi", "rotated"]
)
def test_scales_leave_the_function(config: ModelConfig) -> None:
    layer, statistics, hidden = layer_and_statistics(config)
    rounding = partial(round_to_nearest, group_size=32)
    scaled, moved = scale_layer(layer, statistics, rounding, config)
    before, after = (
        calibration.advance(each, hidden, 0, config, lambda: None) for each in (layer, scaled)
    )
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)
    measured = calibration.observe(scaled, hidden, 0, config, lambda: None)
    for name, expected in measured.items():
        np.testing.assert_allclose(moved[name].magnitude, expected.magnitude, rtol=1e-4)
        np.testing.assert_allclose(
            moved[name].second_moment, expected.second_moment, rtol=1e-3, atol=1e-4
        )
    changed = {name for name in ("o", "down") if getattr(scaled, name) is not getattr(layer, name)}
    assert changed == {CONFIG: {"down"}, MULTI_HEAD: {"o", "down"}, ROTATED: set()}[config]
    assert np.abs(scaled.q.weight / layer.q.weight - 1).max() > 0.1


# A bfloat16 norm cannot represent every quotient: the weights make up exactly for its rounding.
def test_scales_know_the_rounded_norm() -> None:
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    layer = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), random_model(CONFIG).layers[0])
    norm = layer.attention_norm.astype(jnp.bfloat16).astype(jnp.float32)
    layer = dataclasses.replace(layer, attention_norm=norm)
    x = inputs_of(config.hidden_size)
    statistics = dict.fromkeys(("q", "k", "v", "o", "gate", "up"), statistics_of(x))
    statistics["o"] = statistics_of(inputs_of(config.num_heads * config.head_dim))
    statistics["down"] = statistics_of(inputs_of(config.intermediate_size))
    rounding = partial(round_to_nearest, group_size=32)
    scaled, _ = scale_layer(layer, statistics, rounding, config)
    assert scaled.attention_norm.dtype == jnp.bfloat16
    product = scaled.q.weight * scaled.attention_norm.astype(jnp.float32)
    np.testing.assert_allclose(product, layer.q.weight * norm, rtol=1e-6)


def test_scales_of_ratio() -> None:
    magnitude = jnp.asarray([0.0, 1.0, 4.0, 9.0])
    np.testing.assert_array_equal(scales_of_ratio(magnitude, 0.0), np.ones(4))
    scales = np.asarray(scales_of_ratio(magnitude, 0.5))
    np.testing.assert_allclose(scales[1:] / scales[1], [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(scales.max() * scales.min(), 1, rtol=1e-5)
