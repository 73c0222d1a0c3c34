"""Drafts without a model: what they propose, and that output does not change."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax import DraftModel, MultiLevel, NGram, PromptLookup
from specjax.speculation.state import DecodeState, Stats
from tests.support import spectra_model
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_model

ROWS, WIDTH = 3, 50
PARAMS = random_model()


def text_state(tokens: np.ndarray, lengths: np.ndarray) -> DecodeState:
    """A state in which drafters that read the text alone find what they need."""
    rows = len(lengths)
    return DecodeState(
        tokens=jnp.asarray(tokens, jnp.int32), prompts=jnp.ones(rows, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32), limits=jnp.full(rows, WIDTH),
        finished=jnp.zeros(rows, bool), failed=jnp.zeros(rows, bool), cache=None,
        keys=None, draft=None, stats=Stats.zeros(rows), sampling=None, stop_tokens=(),
        vocab_size=CONFIG.vocab_size,
    )  # fmt: skip


def proposed(proposal) -> list[list[int]]:
    rows = zip(proposal.tokens.tolist(), proposal.counts.tolist(), strict=True)
    return [row[:count] for row, count in rows]


LOOKUPS = [PromptLookup(), PromptLookup(4, longest=2), PromptLookup(3, 5, 2, whole=True)]


@pytest.mark.parametrize("drafter", LOOKUPS, ids=repr)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_prompt_lookup_is_the_published_rule(drafter: PromptLookup, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, rng.integers(1, 6, endpoint=True), (ROWS, WIDTH))
    lengths = rng.integers(1, WIDTH, ROWS, endpoint=True)
    proposal, _ = _propose(drafter, text_state(tokens, lengths))
    for row, length, ours in zip(tokens.tolist(), lengths, proposed(proposal), strict=True):
        fields = dataclasses.asdict(drafter)
        assert ours == spectra_model.prompt_lookup(row[:length], **fields)


@pytest.mark.parametrize("drafter", [NGram(), NGram(4, ngram=2), NGram(6, ngram=5)], ids=repr)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_ngram_counts_are_those_of_a_counter(drafter: NGram, seed: int) -> None:
    """Round after round, also where tokens were taken back since: a level's drafts."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, rng.integers(1, 6, endpoint=True), (ROWS, WIDTH))
    lengths = rng.integers(1, WIDTH // 2, ROWS)
    state = text_state(tokens, lengths)
    state = dataclasses.replace(state, draft=_init(drafter, state))
    for _ in range(3):
        proposal, state = _propose(drafter, state)
        for row, length, ours in zip(tokens.tolist(), lengths, proposed(proposal), strict=True):
            text = row[:length]
            assert ours == spectra_model.most_frequent(text, drafter.draft_length, drafter.ngram)
        back = rng.integers(0, 4, ROWS)
        for row, length in enumerate(lengths):
            tokens[row, max(length - back[row], 1) : length] = 0
        lengths = np.clip(lengths - back + rng.integers(0, 20, ROWS), 1, WIDTH)
        state = dataclasses.replace(state, tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths))


_propose = jax.jit(lambda drafter, state: drafter.propose(None, state))
_init = jax.jit(lambda drafter, state: drafter.init(None, state, 1))


# Prompts that repeat themselves, and one that cannot.
PROMPTS = [[7, 8, 9, 10] * 3, [3], [40, 41, 42, 40, 41, 42, 40, 41]]
NEW = 32
DRAFTERS = {
    "prompt lookup": PromptLookup(),
    "the original's rule": PromptLookup(3, whole=True),
    "n-grams": NGram(),
    "n-grams below a draft model": MultiLevel(DraftModel(quantized_model(), 4), NGram(2)),
}


@pytest.fixture(scope="module")
def plain() -> specjax.DecodeResult:
    return specjax.decode(PARAMS, PROMPTS, max_new_tokens=NEW, drafter=specjax.Autoregressive())


@pytest.mark.recompiled
@pytest.mark.parametrize("name", representatives(DRAFTERS, "prompt lookup", "n-grams"))
def test_greedy_output_does_not_change(plain: specjax.DecodeResult, name: str) -> None:
    result = specjax.decode(PARAMS, PROMPTS, max_new_tokens=NEW, drafter=DRAFTERS[name])
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.lengths, plain.lengths)
    for stats in (result.stats, *result.levels):
        assert int(jnp.sum(stats.accepted)) > 0, "nothing was ever accepted"


@pytest.mark.parametrize(
    "drafter", representatives([PromptLookup(), NGram()], PromptLookup()), ids=repr
)
def test_a_row_does_not_depend_on_its_batch(drafter: specjax.Drafter) -> None:
    together = specjax.decode(PARAMS, PROMPTS, max_new_tokens=NEW, drafter=drafter)
    width = max(map(len, PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        padded = jnp.array([prompt + [0] * (width - len(prompt))])
        alone = specjax.decode(
            PARAMS, padded, prompt_lengths=[len(prompt)], max_new_tokens=NEW, drafter=drafter
        )
        for ours, theirs in zip(
            jax.tree.leaves(alone.stats), jax.tree.leaves(together.stats), strict=True
        ):
            assert int(ours[0]) == int(theirs[row])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptLookup(0), "draft_length must be at least 1, got 0"),
        (lambda: PromptLookup(longest=1, shortest=2), "longest must be at least shortest=2, got 1"),
        (lambda: PromptLookup(shortest=0), "shortest must be at least 1, got 0"),
        (lambda: NGram(ngram=1), "ngram must be at least 2, got 1"),
        (lambda: NGram(2.5), "draft_length must be an integer, got 2.5"),
    ],
)
def test_bad_input(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
