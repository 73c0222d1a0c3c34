"""Compares the reference kernels with their definition in float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools.quantization.rtn import round_to_nearest
from pallas_kernels.activations import LEVELS, quantize_activations
from pallas_kernels.attention import attention
from pallas_kernels.matmul import matmul
from pallas_kernels.norms import rms_norm
from tests.support.compiled import dequantize


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 172), (9, 33, 640), (3, 96, 64)])
@pytest.mark.covering(1)
def test_a16_is_the_product_with_the_dequantized_weight(m, n, k, group_size) -> None:
    x, weight = _normal(m, k), round_to_nearest(_normal(n, k, seed=1), group_size)
    exact = np.asarray(x, np.float64) @ np.asarray(dequantize(weight), np.float64).T
    np.testing.assert_allclose(matmul(x, weight), exact, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("activation", ["a8", "a4"])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 172), (9, 33, 640)])
@pytest.mark.covering(1)
def test_quantized_activations_by_the_equation(m, n, k, group_size, activation) -> None:
    """y = Σ_k (qx · sx)(qw · sw), with the activations rounded in NumPy."""
    x, weight = _normal(m, k), round_to_nearest(_normal(n, k, seed=1), group_size)
    rounded = np.zeros((m, k))
    for begin in range(0, k, group_size or k):
        part = np.asarray(x[:, begin : begin + (group_size or k)])
        scale = np.abs(part).max(axis=1, keepdims=True) * np.float32(1 / LEVELS[activation])
        rounded[:, begin : begin + part.shape[1]] = np.round(part * (1 / scale)) * scale
    exact = rounded @ np.asarray(dequantize(weight), np.float64).T
    got = matmul(x, weight, activation)
    np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(exact).max())
    error = np.abs(np.asarray(matmul(x, weight)) - np.asarray(got)).max()
    assert error > 1e-4 * np.abs(exact).max(), "the activations were not quantized at all"


def test_activation_scales_are_the_largest_magnitudes() -> None:
    x = _normal(5, 256).at[2, 128:].set(0)
    q, scales = quantize_activations(x, "a8", 128)
    assert q.dtype == jnp.int8 and int(jnp.abs(q).max()) == 127
    groups = np.asarray(x).reshape(5, 2, 128)
    np.testing.assert_allclose(scales, np.abs(groups).max(-1) / 127, rtol=1e-6)
    error = np.abs(np.asarray(q).reshape(5, 2, 128) * np.asarray(scales)[..., None] - groups)
    assert (error <= np.asarray(scales)[..., None] * 0.5001).all()
    assert scales[2, 1] == 0 and not q[2, 128:].any()


def test_quantization_is_the_same_compiled_and_not() -> None:
    x = _normal(64, 896).at[0, 5].set(-3.5).at[0, 6].set(7.0)
    for activation in ("a8", "a4"):
        compiled = jax.jit(quantize_activations, static_argnums=(1, 2))(x, activation, None)
        for ours, theirs in zip(quantize_activations(x, activation, None), compiled, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_integer_products_are_exact_for_one_scale_per_channel() -> None:
    """A long row of the largest magnitudes exceeds the integers that float32 holds exactly."""
    k = 32768
    x = jnp.ones((2, k)).at[0, 1].set(126 / 127)
    weight = round_to_nearest(jnp.full((2, k), 7.0), None)
    got = np.asarray(matmul(x, weight, "a8"), np.float64)
    scale = float(weight.scales[0, 0]) * np.float64(np.float32(1) / np.float32(127))
    np.testing.assert_allclose(got[0], (127 * (k - 1) + 126) * 7 * scale, rtol=3e-7)


def test_nan_and_zero_rows_stay_their_own() -> None:
    x = _normal(4, 256).at[1].set(jnp.nan).at[2].set(0)
    weight = round_to_nearest(_normal(64, 256, seed=1))
    clean = matmul(_normal(4, 256), weight, "a8")
    for activation in ("a16", "a8", "a4"):
        got = np.asarray(matmul(x, weight, activation))
        assert np.isnan(got[1]).all() and not got[2].any()
        assert np.isfinite(got[[0, 3]]).all()
    np.testing.assert_array_equal(matmul(x, weight, "a8")[0], clean[0])


def test_norm_by_the_book() -> None:
    x, scale = _normal(3, 5, 100), _normal(100, seed=1)
    values = np.asarray(x, np.float64)
    exact = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale)
    np.testing.assert_allclose(rms_norm(x, scale, 1e-5), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (20, 0), (20, 3)])
@pytest.mark.parametrize("tree", [False, True])
def test_attention_by_the_book(window: int | None, sinks: int, tree: bool) -> None:
    """Compares with a plain softmax over each token's visible slots, in float64."""
    rng = np.random.default_rng(3)
    b, t, h, kv, e, slots = 2, 6, 4, 2, 16, 256
    q = rng.normal(size=(b, t, h, e))
    k, v = rng.normal(size=(2, b, slots, kv, e))
    lengths = np.array([0, 140])
    depth = np.array([0, 1, 1, 2, 2, 3]) if tree else np.arange(t)
    parents = [-1, 0, 0, 1, 2, 4] if tree else list(range(-1, t - 1))
    mask, paths = np.zeros((t, t), bool), np.full((t, t), -1)
    for node in range(t):
        at = node
        while at >= 0:
            mask[node, at], paths[node, depth[at]], at = True, at, parents[at]
    positions = lengths[:, None] + depth
    got = attention(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(lengths, jnp.int32),
        jnp.asarray(positions), jnp.asarray(np.stack([paths] * b)) if tree else None,
        window=window, sinks=sinks, head_scale=e**-0.5,
    )  # fmt: skip
    for row in range(b):
        n = lengths[row]
        for token in range(t):
            seen = np.concatenate([np.ones(n, bool), mask[token]])
            at = np.concatenate([np.arange(n), positions[row]])
            if window is not None:
                seen &= (positions[row, token] - at < window) | (at < sinks)
            for head in range(h):
                keys, values = (x[row, : n + t, head // (h // kv)][seen] for x in (k, v))
                score = np.exp(keys @ q[row, token, head] * e**-0.5)
                exact = score @ values / score.sum()
                np.testing.assert_allclose(got[row, token, head], exact, atol=2e-5)


@pytest.mark.usefixtures("wrong_types")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((2, 7))}, "256 inputs, got"),
        ({"x": jnp.ones((2, 256), jnp.int32)}, "bfloat16 or float32, got int32"),
        ({"activation": "a3"}, "activation must be one of a16, a8, a4, got 'a3'"),
        ({"weight": jnp.ones((4, 256)), "activation": "a8"}, "needs a quantized weight"),
        ({"implementation": "abacus"}, "implementation must be one of .*got 'abacus'"),
    ],
)
def test_the_door_refuses_what_does_not_fit(change, message) -> None:
    arguments = {"x": jnp.ones((2, 256)), "weight": round_to_nearest(_normal(8, 256)), **change}
    with pytest.raises(ValueError, match=message):
        matmul(**arguments)
