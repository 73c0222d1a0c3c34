"""Sampled text has exactly the target's distribution, whichever model drafts.

On a vocabulary of five tokens every text of three tokens can be listed, with the probability that
the target's own logits give it. The texts of thousands of rows, drafted and rejected at all places,
are counted against those.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import specjax
from checkpoints_tools.quantization import quantize
from specjax import (
    Adaptive,
    Combined,
    DraftModel,
    Heuristic,
    LayerSkip,
    Lookahead,
    MultiLevel,
    NGram,
    PromptLookup,
    Retrieval,
    Sampling,
    Spectra,
)
from specjax.drafting import registry
from specjax.drafting.costs import Costs
from specjax.drafting.datastore import Datastore
from specjax.model.kv_cache import KVCache
from tests.support.compiled import forward
from tests.support.covering import representatives
from tests.support.drafter_types import types_of
from tests.support.random_models import random_model

VOCABULARY, NEW, ROWS = 5, 3, 3000
PROMPT = [1, 2, 3, 1, 2]  # so that drafts from the text begin at once
CONFIG = specjax.ModelConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=8, max_position_embeddings=64, dtype="float32",
)  # fmt: skip
TARGET = random_model(CONFIG)
INT4 = quantize(TARGET, "rtn", group_size=32, lm_head=True)
MXFP4 = quantize(TARGET, "mxfp4", lm_head=True)
OTHER = random_model(dataclasses.replace(CONFIG, num_layers=1, hidden_size=24), seed=1)
STORE = Datastore.create([np.tile(np.arange(VOCABULARY), 4), np.array([2, 2, 3, 0])], VOCABULARY)

DRAFTERS = {
    "plain": specjax.Autoregressive(),
    "a cast": DraftModel(MXFP4, 2),
    "a cast that shares the cache": DraftModel(INT4, 3, share_cache=True),
    "another model": DraftModel(OTHER, 2),
    "confidence": DraftModel(OTHER, 3, confidence=0.4),
    "heuristic": DraftModel(MXFP4, 3, schedule=Heuristic()),
    "adaptive": DraftModel(OTHER, 3, schedule=Adaptive(), confidence=0.2),
    "skipping": LayerSkip((0,), 2),
    "two levels": MultiLevel(DraftModel(MXFP4, 3), DraftModel(OTHER, 1)),
    "two levels in one cache": MultiLevel(
        DraftModel(INT4, 3, confidence=0.3, share_cache=True), LayerSkip((1,), 2)
    ),
    "three levels": MultiLevel.of(
        [DraftModel(INT4, 3, schedule=Heuristic()), DraftModel(MXFP4, 2), DraftModel(OTHER, 1)]
    ),
    "a tree": specjax.DraftTree(DraftModel(OTHER, 2), 3, 7),
    "a tree in the target's cache": specjax.DraftTree(LayerSkip((0,), 2), 2, 5),
    "QSpec": specjax.QSpec(2, "a4"),
    "prompt lookup": PromptLookup(3),
    "n-grams": NGram(3),
    "auto": specjax.Auto(
        Costs(np.array([1, 1.01, 1.02, 1.5], np.float32), np.float32(0.02)),
        specjax.LayerSkip((0,), 2),
    ),
    "auto and a memory": specjax.Auto(
        Costs(np.ones(4, np.float32), np.float32(1)),
        memory=specjax.SuffixMemory.create(VOCABULARY, capacity=9).add([[0, 1, 2, 1] * 4]),
    ),
    "token recycling": specjax.TokenRecycling(5, 3),
    "lookahead": Lookahead(3, 2, 2, capacity=64),
    "spectra and a corpus": Combined(
        Spectra(3, 2, 1, refine=0.5, capacity=64), Retrieval(STORE, depth=2, shortest=1), extra=6
    ),
    "spectra below a cast": MultiLevel(DraftModel(MXFP4, 3), Spectra(3, 1, 2, capacity=64)),
}
# A model that drafts chains, and trees of guesses without a model.
KINDS = ("another model",)
# One drafter for each way of judging drafts: none, chains with a distribution, chains and trees
# without one, and levels. A batch of one is another program.
ALONE = (
    "plain", "another model", "confidence", "prompt lookup", "a tree", "two levels",
    "auto and a memory",
)  # fmt: skip
EVERYTHING = Sampling(
    temperature=1.4, top_k=4, top_p=0.97, min_p=0.03, repetition_penalty=1.3, presence_penalty=0.4,
    frequency_penalty=0.5, logit_bias={1: 0.5, 4: -0.5},
)  # fmt: skip
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.5, top_p=0.8),
    Sampling(temperature=1.5, min_p=0.2),
    Sampling(repetition_penalty=2.0),
    Sampling(presence_penalty=1.5, logit_bias={0: -1.5, 3: 1}),
    Sampling(temperature=0.8, frequency_penalty=1.2),
    Sampling(temperature=1.5, top_k=2),
]


def _target(name: str) -> specjax.Params:
    """QSpec drafts for a quantized model, all others for the one in 32 bits."""
    return INT4 if name == "QSpec" else TARGET


def _keys() -> jax.Array:
    return jax.random.split(jax.random.key(7), ROWS)


@functools.cache
def _sampled(name: str, sampling: Sampling) -> np.ndarray:
    """The texts of all rows, int[ROWS, NEW]; a row's key is its number's."""
    return _decode(name, sampling, _keys())


def _decode(name: str, sampling: Sampling, keys: jax.Array) -> np.ndarray:
    prompt = jnp.broadcast_to(jnp.array(PROMPT), (len(keys), len(PROMPT)))
    result = specjax.decode(
        _target(name), prompt, max_new_tokens=NEW, drafter=DRAFTERS[name], sampling=sampling,
        key=keys, stop_tokens=(),
    )  # fmt: skip
    assert name == "plain" or (np.asarray(result.stats.drafted) > 0).all()
    return np.asarray(result.tokens[:, len(PROMPT) :])


@functools.cache
def _logits(params_name: str) -> np.ndarray:
    """Computes f32[texts, NEW, V] for every text of NEW - 1 tokens, one row per place."""
    params = _target(params_name)
    texts = list(itertools.product(range(VOCABULARY), repeat=NEW - 1))
    tokens = jnp.array([PROMPT + list(text) for text in texts])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = KVCache.create(CONFIG, len(texts), tokens.shape[1])
    return np.asarray(forward(params, tokens, positions, cache)[0])[:, len(PROMPT) - 1 :]


def _distribution(logits: np.ndarray, before: list[int], sampling: Sampling) -> np.ndarray:
    """Bias, penalties, temperature, top-k, top-p, min-p by the book: one row, a sorted list."""
    values = logits.astype(np.float64)
    if sampling.logit_bias is not None:
        values += np.asarray(sampling.logit_bias.dense(VOCABULARY))[0]
    if sampling.repetition_penalty is not None:
        for token in set(before):
            factor = sampling.repetition_penalty
            values[token] *= factor if values[token] < 0 else 1 / factor
    for token in before[len(PROMPT) :]:
        values[token] -= sampling.frequency_penalty or 0
    for token in set(before[len(PROMPT) :]):
        values[token] -= sampling.presence_penalty or 0
    weights = np.exp((values - values.max()) / sampling.temperature)
    kept = sorted(range(VOCABULARY), key=lambda token: (-weights[token], token))
    kept = kept[: sampling.top_k]
    if sampling.top_p is not None:
        share = weights[kept] / weights[kept].sum()
        kept = kept[: int((np.cumsum(share) - share < sampling.top_p).sum())]
    if sampling.min_p is not None:
        kept = [token for token in kept if weights[token] >= sampling.min_p * weights.max()]
    exact = np.zeros(VOCABULARY)
    exact[kept] = weights[kept] / weights[kept].sum()
    return exact


def _exact(name: str, sampling: Sampling) -> np.ndarray:
    """The probability of every text, f64[V, V, V]."""
    joint = np.zeros((VOCABULARY,) * NEW)
    logits = _logits("QSpec" if name == "QSpec" else "plain")
    for number, text in enumerate(itertools.product(range(VOCABULARY), repeat=NEW - 1)):
        steps = [
            _distribution(logits[number, place], PROMPT + list(text[:place]), sampling)
            for place in range(NEW)
        ]
        joint[text] = np.prod([steps[i][token] for i, token in enumerate(text)]) * steps[-1]
    np.testing.assert_allclose(joint.sum(), 1, atol=1e-9)
    return joint


def _chance(texts: np.ndarray, exact: np.ndarray) -> float:
    """Chi-square's p-value, rare texts counted together. texts: int[ROWS, places], f64[V, …]."""
    counts = np.bincount(np.ravel_multi_index(texts.T, exact.shape), minlength=exact.size)
    exact = exact.reshape(-1)
    assert not counts[exact == 0].any(), "a text that the target never writes"
    rare = exact * ROWS < 8
    expected = np.append(exact[~rare], exact[rare].sum()) * ROWS
    observed = np.append(counts[~rare], counts[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert len(expected) >= 4, "a case that tests nothing"
    return stats.chisquare(observed, expected).pvalue


def _assert_exact(name: str, sampling: Sampling) -> None:
    """Two places and three, every text."""
    texts, exact = _sampled(name, sampling), _exact(name, sampling)
    assert _chance(texts[:, :2], exact.sum(axis=2)) > 1e-3
    assert _chance(texts, exact) > 1e-3


@pytest.mark.parametrize("name", representatives(DRAFTERS, *KINDS))
def test_texts_have_the_targets_distribution(name: str) -> None:
    _assert_exact(name, EVERYTHING)


@pytest.mark.parametrize("sampling", representatives(SETTINGS, Sampling()), ids=repr)
def test_every_setting_keeps_it(sampling: Sampling) -> None:
    _assert_exact("another model", sampling)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", representatives(DRAFTERS, *KINDS))
def test_a_key_gives_one_text(name: str) -> None:
    """Whatever the other rows and the row's place among them."""
    texts = _sampled(name, EVERYTHING)
    np.testing.assert_array_equal(_decode(name, EVERYTHING, _keys()[::-1]), texts[::-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALONE)
def test_a_row_alone_has_the_text_that_it_has_in_company(name: str) -> None:
    alone = [_decode(name, EVERYTHING, _keys()[row : row + 1])[0] for row in range(32)]
    np.testing.assert_array_equal(alone, _sampled(name, EVERYTHING)[:32])


def test_every_drafter_is_among_them() -> None:
    """But the one between two tokenizers: `test_translated.py` samples with it."""
    found = set().union(*map(types_of, DRAFTERS.values()))
    assert {*registry.DRAFTERS.values()} - found == {specjax.TranslatedDraft}


def test_another_distribution_is_noticed() -> None:
    """The test itself: texts of another temperature do not pass."""
    assert (
        _chance(_sampled("plain", Sampling()), _exact("plain", Sampling(temperature=1.25))) < 1e-6
    )
