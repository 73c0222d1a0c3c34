"""Perplexity and fidelity against what plain numpy makes of the model's logits."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.evaluation import Perplexity, fidelity, perplexity
from specjax.model.kv_cache import KVCache
from tests.support.compiled import forward
from tests.support.random_models import CONFIG, quantized_model, random_prompts

PARAMS = quantized_model(group_size=32)
WINDOW = 16


def _text(length: int) -> list[int]:
    return random_prompts((length,), CONFIG.vocab_size, seed=3)[0]


def _nats(tokens: list[int]) -> np.ndarray:
    """Negative log-likelihood of tokens[1:], by the definition, in float64.

    Shorter texts are followed by zeros, which no token before them sees, so they share a program.
    """
    padded = np.zeros((1, WINDOW), np.int32)
    padded[0, : len(tokens)] = tokens
    cache = KVCache.create(CONFIG, 1, WINDOW)
    logits, _ = forward(PARAMS, padded, jnp.arange(WINDOW)[None], cache)
    logits = np.asarray(logits[0, : len(tokens)], np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -log_probs[np.arange(len(tokens) - 1), tokens[1:]]


# Disjoint windows: each is a text of its own.
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [2, 16, 17, 40])
def test_disjoint_windows(length, rows) -> None:
    text = _text(length)
    parts = [text[start : start + WINDOW] for start in range(0, length, WINDOW)]
    nats = np.concatenate([_nats(part) for part in parts if len(part) > 1])
    result = perplexity(PARAMS, text, window=WINDOW, rows=rows)
    assert result.tokens == len(nats)
    np.testing.assert_allclose(result.nats, nats.mean(), rtol=1e-5)
    np.testing.assert_allclose(result.perplexity, np.exp(nats.mean()), rtol=1e-5)


def test_a_perplexity_beyond_float64_is_infinite() -> None:
    assert Perplexity(1000.0, 1).perplexity == math.inf


# Sliding windows: every token but the first counts once, with the context of its first window.
@pytest.mark.parametrize("stride", [1, 5, 15])
def test_sliding_windows(stride) -> None:
    text, nats, reached = _text(33), [], 1
    for start in range(0, len(text) - 1, stride):
        part = text[start : start + WINDOW]
        nats += _nats(part)[reached - start - 1 :].tolist()
        reached = start + len(part)
        if reached == len(text):
            break
    result = perplexity(PARAMS, text, window=WINDOW, stride=stride, rows=2)
    assert result.tokens == len(nats) == 32
    np.testing.assert_allclose(result.nats, np.mean(nats), rtol=1e-5)


def test_fewer_bits_predict_worse() -> None:
    params = specjax.load("tiny")
    tokenizer = specjax.load_tokenizer("tiny")
    text = tokenizer.encode("Once upon a time there was a king who had three daughters. " * 8)
    nats = {a: perplexity(params, text, window=64, activation=a).nats for a in ("a16", "a8", "a4")}
    assert abs(nats["a8"] - nats["a16"]) < abs(nats["a4"] - nats["a16"])


@pytest.mark.exhaustive
def test_fidelity_is_what_drafts_of_one_token_meet() -> None:
    """A draft of one token per round is accepted where the draft's best token is the target's."""
    prompts = random_prompts((3, 9, 6), CONFIG.vocab_size)
    compared = fidelity(PARAMS, prompts, activation="a4", max_new_tokens=20, rows=2)
    assert len(compared.accepted) == 60
    assert ((compared.precise > 0) & (compared.precise <= 1)).all()
    assert (compared.drafted > 0).all() and not (compared.drafted == compared.precise).all()
    single = dataclasses.replace(specjax.QSpec(), draft_length=1, activation="a4")
    results = specjax.decode(PARAMS, prompts, max_new_tokens=20, drafter=single)
    assert 0 < compared.accepted.mean() < 1
    # Every round tests one draft, and only tokens given by the verifier go untested.
    tested, kept = int(jnp.sum(results.stats.tested)), int(jnp.sum(results.stats.accepted))
    assert abs(compared.accepted.mean() - kept / tested) < 0.2
    assert compared.summary()["accepted"] == pytest.approx(float(compared.accepted.mean()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1]}, "at least two tokens"),
        ({"tokens": [1, 96]}, r"tokens must be in 0 … 95, got 1 … 96"),
        ({"window": 1}, "window must be between 2 and the model's 512 positions, got 1"),
        ({"window": 513}, "got 513"),
        ({"window": 16, "stride": 17}, "stride must be between 1 and window=16, got 17"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"activation": "a2"}, "activation must be one of"),
    ],
)
def test_what_is_refused(arguments, message) -> None:
    given = {"tokens": [1, 2, 3], "window": 16, **arguments}
    with pytest.raises(ValueError, match=message):
        perplexity(PARAMS, **given)
