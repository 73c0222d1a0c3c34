"""nested8: an 8-bit model whose high nibbles are a 4-bit one that drafts."""

from __future__ import annotations

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools import checkpoint
from checkpoints_tools.conversion import quantize_checkpoint
from checkpoints_tools.exporting import export
from checkpoints_tools.loading import load
from checkpoints_tools.quantization.nested8 import round_nested
from checkpoints_tools.quantization.rtn import round_to_nearest
from pallas_kernels.formats import integers
from pallas_kernels.interleave import by_rows
from pallas_kernels.matmul import matmul
from pallas_kernels.nested import NestedInt8Weight
from pallas_kernels.planes import draft_plane, joined, nested_int8_from_integers
from specjax.model.params import Params, stored
from specjax.model.sizes import weight_bytes
from specjax.model.weight_names import is_block_matrix, named_weights
from tests.checkpoints.test_checkpoint import assert_same
from tests.support.compiled import dequantize
from tests.support.covering import left_out
from tests.support.random_models import CONFIG, random_model, random_prompts

PROMPTS = random_prompts((9, 4, 13), CONFIG.vocab_size)
NEW = 24


@functools.cache
def model() -> Params:
    return specjax.quantize(random_model(CONFIG), "nested8", group_size=64, lm_head=True)


def matrix(n: int = 70, k: int = 300) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng([n, k]).normal(size=(n, k)), jnp.float32)


def test_both_readings_of_a_matrix() -> None:
    """The 8-bit one within half a step, the 4-bit one the rounded sixteenth of the same integer."""
    weight = matrix()
    made = round_nested(weight, 64)
    whole, draft = joined(made), draft_plane(made)
    q = np.asarray(integers(whole), np.int32)
    assert q.min() >= -120 and q.max() <= 119 and q.max() > 105
    np.testing.assert_array_equal(integers(draft), (q + 8) >> 4)
    step = np.repeat(np.asarray(whole.scales, np.float32), 64, axis=1)[:, : weight.shape[1]]
    error = np.abs(np.asarray(dequantize(made) - weight))
    assert np.mean(error > 0.51 * step) < 0.02  # clipped
    np.testing.assert_array_equal(dequantize(made), dequantize(whole))


@pytest.mark.parametrize("group_size", [32, 128, None])
def test_errors_beside_those_of_one_reading(group_size: int | None) -> None:
    """The 4-bit plane is as good as round to nearest, all 8 bits nearly as good as int8."""
    weight = matrix(64, 512)
    made = round_nested(weight, group_size)

    def error(values: jnp.ndarray) -> float:
        return float(jnp.sqrt(jnp.mean((values - weight) ** 2)))

    plain4 = error(dequantize(round_to_nearest(weight, group_size)))
    plain8 = error(dequantize(round_to_nearest(weight, group_size, bits=8)))
    assert error(dequantize(draft_plane(made))) < 1.01 * plain4
    assert error(dequantize(made)) < 1.2 * plain8


def test_no_clip_ratio_would_do_better() -> None:
    """The search stops early, and finds what all 80 ratios hold, outliers or none."""
    weight = np.random.default_rng(1).standard_t(3, size=(40, 320)).astype(np.float32)
    groups = weight.reshape(40, -1, 64)

    def errors(scales: np.ndarray) -> np.ndarray:
        """Σ |error|^2.4 of the 4-bit reading and of 16 times the 8-bit one's, f64[40, 5]."""
        scales = scales.astype(np.float64)[..., None]
        q = np.clip(np.round(groups * 16 / scales), -120, 119)
        coarse, fine = groups - np.floor(q / 16 + 0.5) * scales, 16 * groups - q * scales
        both = np.abs(coarse) ** 2.4 + np.abs(fine) ** 2.4
        return both.sum(-1)  # type: ignore[no-any-return]

    largest = np.abs(groups).max(-1) / 7
    tried = [
        errors(np.asarray(jnp.asarray(largest * (1 - i / 100), jnp.bfloat16))) for i in range(80)
    ]
    scales = joined(round_nested(jnp.asarray(weight), 64)).scales
    found = errors(16 * np.asarray(scales)[:40, :5])
    np.testing.assert_allclose(found, np.min(tried, axis=0), rtol=1e-4)
    assert len(set(np.argmin(tried, axis=0).flat)) > 5


@pytest.mark.parametrize("scale", [3e-3, 5e-5])
def test_small_float16_scales_lose_no_bit(scale: float) -> None:
    """A sixteenth of such a scale is not a float16."""
    q = np.random.default_rng(0).integers(-120, 120, (32, 256))
    scales = jnp.full((32, 2), scale, jnp.float16)
    made = nested_int8_from_integers(jnp.asarray(q, jnp.int8), scales, 128)
    exact = q * float(scales[0, 0]) / 16
    np.testing.assert_array_equal(dequantize(made), exact.astype(np.float32))
    x = jnp.eye(256, dtype=jnp.float32)[:8]
    for name in ("cpu", "reference"):
        y = matmul(x, made, implementation=name)
        np.testing.assert_array_equal(y.T, exact[:, :8].astype(np.float32))


@pytest.mark.parametrize("activation", ["a8", "a4"])
def test_a_draft_reads_the_high_nibbles_alone(activation: str) -> None:
    weight = model().head.weight
    assert isinstance(weight, NestedInt8Weight)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, weight.shape[1])), jnp.float32)
    expected = matmul(x, draft_plane(weight), activation)
    np.testing.assert_array_equal(matmul(x, weight, activation), expected)


def test_the_form_of_a_model() -> None:
    for name, weight in named_weights(model()).items():
        drafts = is_block_matrix(name) or name == "lm_head.weight"
        assert isinstance(weight, NestedInt8Weight) == drafts, name
    assert model().quantized and "NestedInt8Weight" in repr(model())
    counted = weight_bytes(CONFIG, "nested8", group_size=64, lm_head=True)
    assert stored(model()).nbytes == counted


@pytest.mark.recompiled
@pytest.mark.parametrize(
    "drafter",
    [
        specjax.QSpec(3, "a8"),
        left_out(specjax.QSpec(2, "a4")),
        left_out(specjax.MultiLevel(specjax.QSpec(4, "a8"), specjax.NGram(2))),
        specjax.Auto(),
    ],
    ids=repr,
)
def test_drafts_change_nothing(drafter: specjax.Drafter) -> None:
    plain = specjax.decode(
        model(), PROMPTS, max_new_tokens=NEW, drafter=specjax.Autoregressive(), logprobs=2
    )
    result = specjax.decode(model(), PROMPTS, max_new_tokens=NEW, drafter=drafter, logprobs=2)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.logprobs.tokens, plain.logprobs.tokens)
    if isinstance(drafter, specjax.QSpec) and drafter.activation == "a8":
        assert 0 < float(result.stats.acceptance_rate) < 1, "a case that tests nothing"


def test_checkpoints(tmp_path: Path) -> None:
    """Saved, or converted from a checkpoint, a model is the one in memory; exported, 8 bits."""
    specjax.save(model(), tmp_path / "saved")
    assert_same(checkpoint.load(tmp_path / "saved"), model())
    specjax.save(random_model(CONFIG), tmp_path / "plain")
    quantize_checkpoint(
        tmp_path / "plain", tmp_path / "made", "nested8", group_size=64, lm_head=True,
        progress=False,
    )  # fmt: skip
    assert_same(load(tmp_path / "made"), model())
    narrow = specjax.quantize(random_model(CONFIG), "nested8", group_size=None, lm_head=True)
    export(narrow, tmp_path / "exported")
    back = named_weights(load(tmp_path / "exported"))
    for name, weight in named_weights(narrow).items():
        if isinstance(weight, NestedInt8Weight):
            np.testing.assert_array_equal(dequantize(back[name]), dequantize(by_rows(weight)))


def test_it_is_not_quantized_twice() -> None:
    with pytest.raises(ValueError, match="is quantized already"):
        specjax.quantize(model(), "rtn")
    again = specjax.quantize(specjax.dequantize(model()), "rtn", group_size=64)
    assert again.quantized


@pytest.mark.exhaustive
def test_awq_scales_it() -> None:
    calibration = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 32))
    made = specjax.quantize(
        random_model(CONFIG), "awq+nested8", group_size=64, calibration=calibration
    )
    assert isinstance(named_weights(made)["layers.0.gate.weight"], NestedInt8Weight)
