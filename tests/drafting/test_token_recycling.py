"""Token Recycling: the matrix holds what the target thought likely, the tree follows it, and the
output does not change."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafting.token_recycling import tree_shape
from specjax.generation.decoding import start
from specjax.speculation.rounds import step
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_prompts

PARAMS = quantized_model()
PROMPTS = random_prompts((3, 7, 12), CONFIG.vocab_size)
NEW = 32
DRAFTERS = {
    "wide": specjax.TokenRecycling(20, 8),
    "narrow": specjax.TokenRecycling(7, 3),
    "one token": specjax.TokenRecycling(1, 1),
    "below a level": specjax.MultiLevel(specjax.QSpec(4), specjax.TokenRecycling(7, 3)),
}


SAMPLED = {"sampling": specjax.Sampling(temperature=0.4), "key": jax.random.key(2)}
# Sampled, a level above draws by the rejection rule, so its tokens are others.
CASES = [(name, {}) for name in DRAFTERS] + [("wide", SAMPLED), ("narrow", SAMPLED)]


@pytest.mark.recompiled
@pytest.mark.parametrize(("name", "drawn"), representatives(CASES, ("wide", SAMPLED)))
def test_output_is_that_of_plain_decoding(name: str, drawn: dict[str, object]) -> None:
    options: dict[str, object] = {"max_new_tokens": NEW, "stop_tokens": (), **drawn}
    plain = specjax.decode(PARAMS, PROMPTS, drafter=specjax.Autoregressive(), **options)
    ours = specjax.decode(PARAMS, PROMPTS, drafter=DRAFTERS[name], **options)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    for counts in (ours.stats, *ours.levels):
        assert int(counts.accepted.sum()) > 0, "a case that tests nothing"


@pytest.mark.exhaustive
def test_the_matrix_holds_what_the_target_thought_likely() -> None:
    drafter = specjax.TokenRecycling(9, 4)
    state = start(PARAMS, PROMPTS, drafter=drafter, max_new_tokens=NEW, stop_tokens=())
    for _ in range(4):
        before, last = np.asarray(state.draft.matrix), np.asarray(state.last_tokens)
        state, verified = step(PARAMS, state, drafter)
        after, logits = np.asarray(state.draft.matrix), np.asarray(verified.logits)
        for row, token in enumerate(last):
            likely = np.argsort(-logits[row, 0], kind="stable")[:4]
            if token not in np.asarray(verified.proposed)[row]:
                np.testing.assert_array_equal(after[row, token], likely)
            read = {token, *np.asarray(verified.proposed)[row].tolist()}
            others = [each for each in range(CONFIG.vocab_size) if each not in read]
            np.testing.assert_array_equal(after[row, others], before[row, others])


def test_the_matrix_begins_with_the_prompt() -> None:
    prompts = [[1, 2, 3, 4], [5, 6, 5, 7, 5]]
    state = start(PARAMS, prompts, drafter=specjax.TokenRecycling(9, 4), max_new_tokens=NEW)
    known: list[dict[int, int]] = [{1: 2, 2: 3, 3: 4}, {5: 7, 6: 5, 7: 5}]
    for row, follow in enumerate(known):
        matrix = np.full((CONFIG.vocab_size, 4), -1)
        for token, after in follow.items():
            matrix[token, 0] = after
        np.testing.assert_array_equal(state.draft.matrix[row], matrix)


def test_the_tree_follows_the_matrix() -> None:
    drafter = specjax.TokenRecycling(12, 3)
    state = start(PARAMS, PROMPTS, drafter=drafter, max_new_tokens=NEW, stop_tokens=())
    rng = np.random.default_rng(0)
    shape = state.draft.matrix.shape
    matrix = rng.integers(-1, CONFIG.vocab_size, shape).astype(np.int32)
    draft = state.draft._replace(matrix=jnp.asarray(matrix))
    proposal, _ = drafter.propose(PARAMS, dataclasses.replace(state, draft=draft))
    parents, ranks, _ = tree_shape(12, 3)
    np.testing.assert_array_equal(proposal.parents, np.broadcast_to(parents, (3, 12)))
    for row, last in enumerate(np.asarray(state.last_tokens)):
        found: list[int] = []
        for parent, rank in zip(parents, ranks, strict=True):
            above = last if parent < 0 else found[parent]
            found.append(-1 if above < 0 else int(matrix[row, above, rank]))
        np.testing.assert_array_equal(proposal.verifiable[row], np.array(found) >= 0)
        np.testing.assert_array_equal(proposal.tokens[row], np.maximum(found, 0))


@pytest.mark.parametrize(("nodes", "successors"), [(1, 1), (20, 1), (80, 8), (200, 2)])
def test_a_tree_has_the_best_nodes_and_parents_first(nodes: int, successors: int) -> None:
    parents, ranks, depths = tree_shape(nodes, successors)
    chances: list[float] = []
    for node, (parent, rank, depth) in enumerate(zip(parents, ranks, depths, strict=True)):
        assert -1 <= parent < node and 0 <= rank < successors
        assert depth == (1 if parent < 0 else depths[parent] + 1)
        chances.append((1 if parent < 0 else chances[parent]) * (rank + 2) ** -1.5)
    assert len({*zip(parents, ranks, strict=True)}) == nodes
    assert all(one >= other - 1e-9 for one, other in pairwise(chances))
    for fewer in range(1, nodes, 7):
        np.testing.assert_array_equal(tree_shape(fewer, successors)[0], parents[:fewer])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes must be in 1 … 1024, got 0"),
        ({"successors": 65}, "successors must be in 1 … 64, got 65"),
        ({"nodes": 2.5}, "nodes must be an integer, got 2.5"),
    ],
)
def test_a_field_out_of_its_range_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specjax.TokenRecycling(**options)


def test_more_successors_than_tokens_are_refused() -> None:
    small = quantized_model(dataclasses.replace(CONFIG, vocab_size=32))
    with pytest.raises(ValueError, match="successors must be at most the vocabulary's 32 entries"):
        specjax.decode(small, [1, 2], drafter=specjax.TokenRecycling(4, 33))
