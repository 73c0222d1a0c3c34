"""Lookahead and SPECTRA-CORE: token for token a plain Python program, and no output changes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax import DraftModel, Lookahead, MultiLevel, Spectra
from specjax.speculation.state import Verified
from tests.drafting.test_ngram_drafters import text_state
from tests.support.covering import representatives
from tests.support.random_models import quantized_model, random_model
from tests.support.spectra_model import Window

ROWS, WIDTH, VOCAB = 2, 60, 6
SMALL = {"ngram": 3, "window": 2, "guesses": 2, "capacity": 32}
CASES = {
    "lookahead": Lookahead(**SMALL),
    "lookahead, the window alone": Lookahead(4, 3, 2, 256, text=False),
    "spectra": Spectra(**SMALL, refine=0.5),
    "spectra, longer n-grams": Spectra(5, 3, 3, refine=0.1, backward_length=2),
    "spectra, bigrams": Spectra(2, 1, 1),
    "no forward dictionary": Spectra(**SMALL, forward=False),
    "no backward dictionary": Spectra(**SMALL, backward=False),
    "no sub-n-grams": Spectra(**SMALL, parts=False),
    "no text": Spectra(**SMALL, refine=1, text=False),
    "the paper's": Spectra.paper(**SMALL),
    "as many guesses of text": Spectra(**SMALL, budget="guesses"),
}


def _model(drafter: Lookahead | Spectra, window: list[int]) -> Window:
    common = (window, drafter.ngram, drafter.guesses, drafter.capacity)
    if isinstance(drafter, Lookahead):
        return Window(
            *common, matches=drafter.guesses, refine=0, text=drafter.text, forward=True,
            backward=0, parts=False,
        )  # fmt: skip
    return Window(
        *common, matches=4 * drafter.guesses, refine=drafter.refine, text=drafter.text,
        forward=drafter.forward, backward=drafter.backward * drafter.backward_length,
        parts=drafter.parts, counted=drafter.budget == "guesses",
    )  # fmt: skip


def _verified(logits: jax.Array, count: jax.Array) -> Verified:
    """Selects the part of a pass's result that these drafters read."""
    rest = {field.name: None for field in dataclasses.fields(Verified)}
    choices = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return Verified(**rest | {"logits": logits, "choices": choices, "count": count})


@pytest.mark.parametrize(
    "name", representatives(CASES, "lookahead", "spectra", "no text", "the paper's")
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_every_proposal_is_the_plain_programs(name: str, seed: int) -> None:
    """On random texts of few tokens, with random logits, over rounds of several tokens each."""
    drafter, rng = CASES[name], np.random.default_rng(seed)
    tokens = rng.integers(0, rng.integers(2, VOCAB, endpoint=True), (ROWS, WIDTH))
    lengths = rng.integers(1, 12, ROWS)
    state = text_state(tokens, lengths)
    state = dataclasses.replace(state, draft=_init(drafter, state))
    models = [_model(drafter, row.tolist()) for row in state.draft.window]
    for model, row, length in zip(models, tokens.tolist(), lengths, strict=True):
        assert {token for column in model.columns for token in column} <= set(row[:length])
    for number in range(6):
        proposal, state = _propose(drafter, state)
        assert proposal.tokens.shape == (ROWS, drafter.draft_length)
        logits = rng.normal(size=(ROWS, drafter.draft_length + 1, VOCAB)).astype(np.float32)
        draws = np.zeros(drafter.window)
        if isinstance(drafter, Spectra):
            draws = np.asarray(drafter.draws(jnp.array([number]))[0])
        for row, (model, length) in enumerate(zip(models, lengths, strict=True)):
            expected = model.propose(tokens[row, :length].tolist())
            count = int(proposal.counts[row])
            ours = zip(proposal.tokens[row].tolist(), proposal.parents[row].tolist(), strict=True)
            assert list(ours)[:count] == expected
            verifiable = np.asarray(proposal.verifiable[row, :count])
            np.testing.assert_array_equal(verifiable, np.arange(count) >= drafter.riding)
            model.observe(logits[row].tolist(), draws.tolist())
        gained = rng.integers(1, drafter.ngram, ROWS, endpoint=True)
        lengths = np.minimum(lengths + gained, WIDTH)
        verified = _verified(jnp.asarray(logits), jnp.asarray(gained))
        state = dataclasses.replace(
            state, lengths=jnp.asarray(lengths), draft=_observe(drafter, state.draft, verified)
        )


_init = jax.jit(lambda drafter, state: drafter.init(PARAMS, state, 1))
_propose = jax.jit(lambda drafter, state: drafter.propose(PARAMS, state))
_observe = jax.jit(lambda drafter, draft, verified: drafter.observe(draft, verified))


PROMPTS = [[7, 8, 9, 10] * 3, [3], [40, 41, 42, 40, 41, 42, 40, 41]]
NEW = 32
PARAMS = random_model()
DRAFTERS = {
    "lookahead": Lookahead(4, 3, 2),
    "spectra": Spectra(4, 3, 3),
    "spectra below a draft model": MultiLevel(DraftModel(quantized_model(), 4), Spectra(3, 2, 2)),
}


@pytest.fixture(scope="module")
def plain() -> specjax.DecodeResult:
    return specjax.decode(PARAMS, PROMPTS, max_new_tokens=NEW, drafter=specjax.Autoregressive())


@pytest.mark.recompiled
@pytest.mark.parametrize("name", representatives(DRAFTERS, "lookahead"))
def test_greedy_output_does_not_change(plain: specjax.DecodeResult, name: str) -> None:
    result = specjax.decode(PARAMS, PROMPTS, max_new_tokens=NEW, drafter=DRAFTERS[name])
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.lengths, plain.lengths)
    for level in (result.stats, *result.levels):
        assert int(jnp.sum(level.accepted)) > 0, "nothing was ever accepted"


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    """4 · capacity · (N + 1) bytes per row, the window, and three numbers."""
    drafter = Spectra()
    state = dataclasses.replace(text_state(np.zeros((4, 100)), np.full(4, 9)), vocab_size=151_936)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(_init(drafter, state)))
    assert held == 4 * (4 * 8192 * 6 + 4 * 15 * 4 + 3 * 4)


def test_the_papers_choices() -> None:
    ours, papers = dataclasses.asdict(Spectra()), dataclasses.asdict(Spectra.paper())
    differing = {name: value for name, value in papers.items() if value != ours[name]}
    assert differing == {"text": False, "backward_length": 4, "budget": "guesses"}
    assert Spectra.paper(ngram=3).backward_length == 2
    assert Spectra.paper(backward_length=7, guesses=4) == Spectra(
        text=False, backward_length=7, budget="guesses", guesses=4
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lookahead(ngram=1), "ngram must be at least 2, got 1"),
        (lambda: Lookahead(window=0), "window must be at least 1, got 0"),
        (lambda: Spectra(guesses=0), "guesses must be at least 1, got 0"),
        (lambda: Spectra(guesses=100, capacity=399), "capacity must be at least 400"),
        (lambda: Spectra(refine=1.5), "refine must be in 0 … 1, got 1.5"),
        (lambda: Spectra(forward=False, backward=False), "nothing is left to guess from"),
        (lambda: Spectra(backward_length=0), "backward_length must be at least 1, got 0"),
        (lambda: Spectra(budget="all"), "budget must be tokens or guesses, got 'all'"),
        (lambda: Spectra.paper(ngram=1), "ngram must be at least 2, got 1"),
        (lambda: Spectra.paper(ngram="5"), "ngram must be an integer, got '5'"),
        (lambda: Spectra(seed=0.5), "seed must be an integer, got 0.5"),
    ],
)
def test_bad_input(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
