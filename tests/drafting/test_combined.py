"""Two sources of guesses in one proposal: what it holds, and that output does not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax import (
    Combined,
    DraftModel,
    Lookahead,
    MultiLevel,
    NGram,
    PromptLookup,
    QSpec,
    Retrieval,
    Spectra,
)
from specjax.drafting.combined import merge
from specjax.drafting.datastore import Datastore
from specjax.speculation.state import Proposal
from specjax.speculation.trees import from_sequences
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_model

Path = tuple[int, ...]


def _trie(rng: np.random.Generator, nodes: int) -> Proposal:
    sequences = jnp.asarray(rng.integers(0, 3, (2, 5, 4)))
    lengths = jnp.asarray(rng.integers(0, 4, (2, 5), endpoint=True))
    tokens, parents, counts = from_sequences(sequences, lengths, nodes)
    return Proposal(tokens, counts, parents=parents)


def _chain(rng: np.random.Generator, nodes: int) -> Proposal:
    return Proposal(
        jnp.asarray(rng.integers(0, 3, (2, nodes))), jnp.asarray(rng.integers(0, nodes, 2))
    )


def _riding(proposal: Proposal, rng: np.random.Generator) -> Proposal:
    """The same behind two tokens that are never accepted."""
    rows, nodes = proposal.tokens.shape
    assert proposal.parents is not None
    window = jnp.asarray(rng.integers(0, 3, (rows, 2)))
    above = jnp.where(proposal.parents < 0, -1, proposal.parents + 2)
    return Proposal(
        jnp.concatenate((window, proposal.tokens), axis=1),
        proposal.counts + 2,
        parents=jnp.concatenate((jnp.tile(jnp.array([-1, 0]), (rows, 1)), above), axis=1),
        verifiable=jnp.tile(jnp.arange(nodes + 2) >= 2, (rows, 1)),
    )


def _paths(proposal: Proposal, row: int) -> list[tuple[Path, bool]]:
    """The tokens up to each node, and whether it may be accepted; parents come first."""
    proposal = jax.device_get(proposal)
    count = int(proposal.counts[row])
    parents = range(-1, count - 1) if proposal.parents is None else proposal.parents[row].tolist()
    may = [True] * count if proposal.verifiable is None else proposal.verifiable[row].tolist()
    paths: list[tuple[Path, bool]] = []
    for node, token in enumerate(proposal.tokens[row, :count].tolist()):
        before = paths[parents[node]][0] if parents[node] >= 0 else ()
        paths.append(((*before, token), may[node]))
    return paths


_merge = jax.jit(merge, static_argnums=2)


@pytest.mark.parametrize("kind", representatives(["trees", "chains", "behind a window"], "trees"))
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), extra=st.integers(0, 12))
def test_a_merged_tree_holds_every_path_once(kind: str, seed: int, extra: int) -> None:
    """The first one's nodes where they were, then the second one's that are new, in its order."""
    rng = np.random.default_rng(seed)
    first, second = _trie(rng, 8), _trie(rng, 6)
    if kind == "chains":
        first, second = _chain(rng, 6), _chain(rng, 5)
    if kind == "behind a window":
        first = _riding(first, rng)
    nodes = first.tokens.shape[1] + extra
    both = _merge(first, second, nodes)
    assert both.tokens.shape == both.parents.shape == (2, nodes)
    for row in range(2):
        expected = _paths(first, row)
        known = {path for path, may in expected if may}
        expected += [each for each in _paths(second, row) if each[0] not in known]
        assert _paths(both, row) == expected[:nodes]


PROMPTS = [[7, 8, 9, 10] * 3, [3, 5], [40, 41, 42, 40, 41, 42, 40, 41]]
NEW = 32
WIDE, INT4 = random_model(), quantized_model()


def _spectra(params: specjax.Params) -> Combined:
    """With a corpus that the model wrote after other prompts, so that some of it is found."""
    starts = jnp.arange(2, 90, 4)[:, None]
    texts = specjax.decode(params, starts, max_new_tokens=40, drafter=specjax.Autoregressive())
    store = Datastore.create(list(np.asarray(texts.tokens)), CONFIG.vocab_size)
    return Combined(Spectra(3, 2, 2), Retrieval(store, nodes=6, depth=4, shortest=1))


DRAFTERS = {
    "SPECTRA": (WIDE, _spectra),
    "three": (
        WIDE,
        lambda _: Combined(Combined(Lookahead(3, 2, 2), NGram(3)), PromptLookup(4), extra=2),
    ),
    "below QSpec": (INT4, lambda params: MultiLevel(QSpec(5), _spectra(params))),
    "below a cast": (
        WIDE,
        lambda params: MultiLevel(DraftModel(INT4, 5, share_cache=True), _spectra(params)),
    ),
}


@pytest.mark.recompiled
@pytest.mark.parametrize("name", representatives(DRAFTERS, "below QSpec"))
def test_greedy_output_does_not_change(name: str) -> None:
    params, make = DRAFTERS[name]
    drafter = make(params)
    plain, drafted = (
        specjax.decode(params, PROMPTS, max_new_tokens=NEW, drafter=each)
        for each in (specjax.Autoregressive(), drafter)
    )
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    np.testing.assert_array_equal(drafted.lengths, plain.lengths)
    for level in (drafted.stats, *drafted.levels):
        assert int(jnp.sum(level.accepted)) > 0, "nothing was ever accepted"


def test_a_tree_below_a_level_needs_room_in_the_cache() -> None:
    """Four drafts, and the tree that looks for the fifth."""
    drafter = MultiLevel(QSpec(5), Spectra())
    needed = len(PROMPTS[0]) + NEW + 4 + Spectra().draft_length - 1
    with pytest.raises(ValueError, match=f"need {needed} slots"):
        specjax.decode(INT4, PROMPTS, max_new_tokens=NEW, drafter=drafter, cache_capacity=100)


@pytest.mark.exhaustive
def test_both_sources_count() -> None:
    """A corpus knows one row's text, the window guesses in all: fewer passes than either needs."""

    def decode(drafter: specjax.Drafter) -> specjax.DecodeResult:
        return specjax.decode(WIDE, PROMPTS, max_new_tokens=NEW, drafter=drafter, stop_tokens=())

    text = np.asarray(decode(specjax.Autoregressive()).tokens[1])[: len(PROMPTS[1]) + NEW]
    corpus = Retrieval(Datastore.create([text], CONFIG.vocab_size), nodes=6, depth=4, shortest=1)
    window = Spectra(3, 2, 2)
    both, *alone = (
        int(decode(drafter).stats.rounds.sum())
        for drafter in (Combined(window, corpus, extra=6), window, corpus)
    )
    assert both < min(alone)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Combined(QSpec(), NGram()), "first of a Combined must be a drafter without"),
        (lambda: Combined(NGram(), Spectra()), "second of a Combined must be NGram, PromptLook"),
        (lambda: Combined(NGram(), PromptLookup(), extra=-1), "extra must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_bad_input(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
