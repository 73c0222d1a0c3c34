"""Likelihoods against what plain numpy makes of the model's logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.evaluation.likelihood import log_likelihoods, rolling_log_likelihoods
from specjax.evaluation.scoring import score_logits, score_tokens
from specjax.model.kv_cache import KVCache
from specjax.model.transformer import forward
from tests.support.random_models import CONFIG, quantized_model, random_prompts

SHORT = dataclasses.replace(CONFIG, max_position_embeddings=24)
PARAMS = quantized_model(group_size=32)
_forward = jax.jit(forward)
SHORT_PARAMS = dataclasses.replace(PARAMS, config=SHORT)

# Context and continuation: in one chunk of 64 tokens, up to its end, across it, and in the third.
LENGTHS = ((1, 1), (5, 3), (60, 4), (60, 5), (63, 9), (64, 1), (2, 80), (130, 20))


def _pairs() -> list[tuple[list[int], list[int]]]:
    texts = random_prompts(tuple(map(sum, LENGTHS)), CONFIG.vocab_size, seed=5)
    return [(text[:cut], text[cut:]) for text, (cut, _) in zip(texts, LENGTHS, strict=True)]


def _by_definition(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """In one pass, with the softmax in float64. Padding follows the text, which does not see it."""
    tokens, first = np.array(context + continuation), len(context)
    padded = jnp.asarray(np.pad(tokens, (0, 160 - len(tokens)))[None])
    cache = KVCache.create(CONFIG, 1, 160)
    logits = np.asarray(_forward(PARAMS, padded, jnp.arange(160)[None], cache)[0][0], np.float64)
    logits = logits[first - 1 : len(tokens) - 1]
    given = logits[np.arange(len(continuation)), continuation]
    total = (given - np.log(np.exp(logits).sum(-1))).sum()
    return total, bool((logits.argmax(-1) == continuation).all())


@pytest.mark.parametrize("rows", [1, 3])
def test_is_the_sum_of_log_probabilities(rows: int) -> None:
    pairs = _pairs()
    expected = [_by_definition(*pair) for pair in pairs]
    found = log_likelihoods(PARAMS, pairs, rows=rows)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-5)
    assert [likely for _, likely in found] == [likely for _, likely in expected]


# Greedy output is what the model finds most probable, token by token; another token ends that.
def test_greedy_continuations_are_told_from_others() -> None:
    prompts = random_prompts((3, 20, 61), CONFIG.vocab_size)
    results = specjax.decode_many(PARAMS, prompts, max_new_tokens=8)
    own = [
        each.tokens[len(prompt) :].tolist() for each, prompt in zip(results, prompts, strict=True)
    ]
    changed = [[*tokens[:4], (tokens[4] + 1) % CONFIG.vocab_size, *tokens[5:]] for tokens in own]
    for continuations, expected in ((own, True), (changed, False)):
        scores = log_likelihoods(PARAMS, list(zip(prompts, continuations, strict=True)))
        assert [likely for _, likely in scores] == [expected] * 3


# Batch invariance: every bit is the same, whatever shares the pass.
@pytest.mark.parametrize("activation", ["a16", "a4"])
def test_neighbours_change_no_bit(activation: str) -> None:
    pairs = _pairs()
    alone = log_likelihoods(PARAMS, pairs, rows=1, activation=activation)
    assert log_likelihoods(PARAMS, pairs, rows=4, activation=activation) == alone
    assert log_likelihoods(PARAMS, pairs[::-1], rows=4, activation=activation) == alone[::-1]


# XLA's sums over the vocabulary depend on the shape of the batch; `score_logits` does not.
def test_log_probabilities_do_not_depend_on_the_shape() -> None:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(8, 9, 96)) * 3, jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 96, (8, 9)))
    whole, best = jax.jit(score_logits)(logits, tokens)
    np.testing.assert_array_equal(best, np.argmax(logits, axis=-1))
    for rows, width in ((1, 1), (1, 5), (2, 9), (4, 5)):
        part, _ = jax.jit(score_logits)(logits[:rows, :width], tokens[:rows, :width])
        np.testing.assert_array_equal(part, whole[:rows, :width])


# So a text that is read in chunks has the scores that it has in one pass.
def test_chunks_change_no_bit() -> None:
    for context, continuation in _pairs()[-2:]:
        log_probs, _ = score_tokens(PARAMS, jnp.array([context + continuation]))
        added = [
            log_likelihoods(PARAMS, [(context + continuation[:n], continuation[n : n + 1])])[0][0]
            for n in (0, len(continuation) - 1)
        ]
        expected = np.asarray(log_probs)[0, [len(context) - 1, -1]]
        np.testing.assert_array_equal(np.float32(added), expected)


# A model of 24 positions reads 24 tokens and predicts the one after them.
def test_what_is_too_long_loses_its_first_tokens() -> None:
    context, continuation = random_prompts((40, 6), CONFIG.vocab_size, seed=6)
    expected = _by_definition(context[-19:], continuation)
    for params, options in ((SHORT_PARAMS, {}), (PARAMS, {"max_length": 24})):
        ((found, likely),) = log_likelihoods(params, [(context, continuation)], **options)
        assert found == pytest.approx(expected[0], rel=1e-5)
        assert likely == expected[1]
    kept = random_prompts((24,), CONFIG.vocab_size, seed=7)[0]
    ((found, _),) = log_likelihoods(SHORT_PARAMS, [(context, kept)])
    assert found == pytest.approx(_by_definition(context[-1:], kept)[0], rel=1e-5)


# Windows of 24 tokens: the first after the prefix, the next after one token, the last after all
# that fit beside it.
@pytest.mark.parametrize("length", [1, 23, 24, 25, 48, 60])
def test_rolling(length: int) -> None:
    (text,) = random_prompts((length,), CONFIG.vocab_size, seed=8)
    whole, expected = [0, *text], 0.0
    for start in range(1, length + 1, 24):
        predicted = whole[start : start + 24]
        context = whole[max(0, start + len(predicted) - 25) : start]
        expected += _by_definition(context, predicted)[0]
    (found,) = rolling_log_likelihoods(SHORT_PARAMS, [text], prefix=0)
    assert found == pytest.approx(expected, rel=1e-5)


def test_rolling_over_several_texts() -> None:
    texts = [*random_prompts((60, 7, 30), CONFIG.vocab_size, seed=9), []]
    alone = [rolling_log_likelihoods(SHORT_PARAMS, [text], prefix=3)[0] for text in texts]
    seen = []
    together = rolling_log_likelihoods(
        SHORT_PARAMS, texts, prefix=3, rows=2, progress=lambda *each: seen.append(each)
    )
    assert together == alone
    assert together[-1] == 0
    assert seen == [(2, 6), (4, 6), (6, 6)]


def test_nothing_to_score() -> None:
    assert log_likelihoods(PARAMS, []) == []


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([([1], [2]), ([], [1])], {}, "context of pair 1 must be a list of at least one token id"),
        ([([1], [])], {}, "continuation of pair 0 must be a list of at least one"),
        ([([0.5], [1])], {}, "context of pair 0 must be a list of at least one token id, got"),
        ([([1], [96])], {}, r"continuation of pair 0 must hold tokens in 0 … 95, got 96 … 96"),
        ([([-1], [2])], {}, r"must hold tokens in 0 … 95, got -1 … -1"),
        ([([1], [2] * 513)], {}, "continuation of pair 0 has 513 tokens, and no more than 512"),
        ([([1], [2])], {"rows": 0}, "rows must be at least 1, got 0"),
        ([([1], [2])], {"activation": "a2"}, "activation must be one of"),
        ([([1], [2])], {"max_length": 513}, "max_length must be between 1 and the model's 512"),
    ],
)
def test_what_is_refused(pairs, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        log_likelihoods(PARAMS, pairs, **options)
