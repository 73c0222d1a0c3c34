"""A widened model computes what the small one computes, quantized or not."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from benchmarks.support.widen import first_layers, widen
from specjax.model.kv_cache import KVCache
from tests.support.compiled import forward
from tests.support.covering import representatives
from tests.support.random_models import random_model, random_prompts

SMALL = specjax.ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, dtype="float32",
)  # fmt: skip
SIZES = {
    "vocab_size": 160, "hidden_size": 160, "intermediate_size": 256, "num_layers": 5,
    "num_heads": 12, "num_kv_heads": 3,
}  # fmt: skip
PARAMS = dataclasses.replace(random_model(SMALL), lm_head=None)
WIDE = widen(PARAMS, **SIZES)
PROMPTS = random_prompts((3, 9), SMALL.vocab_size)


def _logits(params: specjax.Params, layers: tuple[int, ...] | None = None) -> np.ndarray:
    tokens = jnp.asarray(random_prompts((24,), SMALL.vocab_size))
    cache = KVCache.create(params.config, 1, 24)
    return np.asarray(forward(params, tokens, jnp.arange(24)[None], cache, layers=layers)[0])


def _assert_same(wide: np.ndarray, small: np.ndarray) -> None:
    np.testing.assert_allclose(wide[..., : SMALL.vocab_size], small, atol=1e-4)
    assert (wide[..., SMALL.vocab_size :] < small.min() - 1000).all()


def test_every_size_has_grown() -> None:
    assert {name: getattr(WIDE.config, name) for name in SIZES} == SIZES
    assert WIDE.layers[0].q.weight.shape == (12 * 32, 160)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", representatives([None, "rtn", "mxfp4", "int8"], "mxfp4"))
def test_logits_are_the_small_models(method: str | None) -> None:
    """Groups of 32 divide all sizes here, and hold the same numbers: casts are alike, too."""
    small, wide = PARAMS, WIDE
    if method is not None:
        options = {"group_size": 32, "lm_head": True}
        small, wide = (specjax.quantize(p, method, **options) for p in (small, wide))
        assert np.abs(_logits(small) - _logits(PARAMS)).max() > 1e-3, "a cast that changes nothing"
    _assert_same(_logits(wide), _logits(small))


def test_a_block_of_layers_stands_for_a_layer() -> None:
    assert first_layers(SMALL, WIDE.config) == (0, 1, 3)
    _assert_same(_logits(WIDE, (0, 3, 4)), _logits(PARAMS, (0, 2)))


def test_added_weights_are_there() -> None:
    """Heads, features and layers that are added have weights of their own, not zeros alone."""
    rows = np.asarray(WIDE.layers[0].gate.weight)[SMALL.intermediate_size :]
    assert (np.abs(rows).sum(axis=1) > 0).all()
    assert np.abs(np.asarray(WIDE.layers[2].v.weight)).min(axis=0).max() > 0
    assert not np.asarray(WIDE.layers[2].o.weight).any()


@pytest.mark.exhaustive
def test_greedy_text_and_drafts_are_the_small_models() -> None:
    """Also the accepted drafts of a cast, round by round."""
    drafts = (specjax.quantize(params, "mxfp4", lm_head=True) for params in (PARAMS, WIDE))
    small, wide = (
        specjax.decode(params, PROMPTS, max_new_tokens=24, drafter=specjax.DraftModel(draft, 3))
        for params, draft in zip((PARAMS, WIDE), drafts, strict=True)
    )
    np.testing.assert_array_equal(wide.tokens, small.tokens)
    np.testing.assert_array_equal(wide.stats.accepted, small.stats.accepted)
    assert 0 < float(small.stats.acceptance_rate) < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size must be at least"),
        ({"hidden_size": 64}, "hidden_size grow"),
        ({"head_dim": 64}, "head_dim must stay"),
        ({"num_heads": 12, "num_kv_heads": 12}, "num_heads / num_kv_heads"),
    ],
)
def test_sizes_that_do_not_hold_the_model(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        widen(PARAMS, **SIZES | changes)


def test_models_that_are_not_widened() -> None:
    with pytest.raises(ValueError, match="an own head"):
        widen(random_model(dataclasses.replace(SMALL, tie_word_embeddings=False)), **SIZES)
    with pytest.raises(ValueError, match="widen first"):
        widen(specjax.quantize(PARAMS, "rtn", group_size=32), **SIZES)
