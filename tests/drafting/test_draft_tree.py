"""The tree has the nodes that a search over plain passes finds, and the output does not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.quantization import quantize
from specjax import DraftModel, DraftTree, LayerSkip, MultiLevel, QSpec, Sampling
from specjax.drafting.draft_tree import _best, _Nodes
from specjax.generation.decoding import start
from specjax.model.kv_cache import KVCache
from specjax.model.transformer import forward
from specjax.speculation import trees
from specjax.speculation.penalties import Earlier
from specjax.speculation.rounds import conclude, propose
from specjax.speculation.sampling import probabilities
from specjax.speculation.state import Proposal
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_model, random_prompts

PARAMS = quantized_model()
CAST = quantize(random_model(), "mxfp4")
PROMPTS = random_prompts((3, 7, 12), CONFIG.vocab_size)
NEW, LONGEST = 16, 64
DRAFTERS = {
    "own reading": DraftTree(QSpec(3, "a4"), 3, 8),
    "own cache": DraftTree(DraftModel(CAST, 3), 2, 5),
    "few nodes of many read": DraftTree(QSpec(3), 3, 2),
    "one pass": DraftTree(LayerSkip((0,), 1), 4, 3),
    "not overwritten": DraftTree(QSpec(2, overwrite=False), 2, 4),
    "below a level": MultiLevel(QSpec(4), DraftTree(LayerSkip((0,), 2), 2, 5)),
    "below a level, own cache": MultiLevel(
        DraftModel(CAST, 4), DraftTree(DraftModel(CAST, 2), 2, 5)
    ),
}  # fmt: skip
SAMPLED = {"sampling": Sampling(temperature=0.4), "key": jax.random.key(2)}
# Sampled, a level above draws by the rejection rule, so its tokens are others.
CASES = [(name, {}) for name in DRAFTERS] + [("own reading", SAMPLED), ("own cache", SAMPLED)]
PENALIZED = Sampling(temperature=0.7, repetition_penalty=1.5)


def decode(
    drafter: specjax.Drafter, prompts: list[list[int]], **drawn: object
) -> specjax.DecodeResult:
    return specjax.decode(
        PARAMS, prompts, max_new_tokens=NEW, stop_tokens=(), drafter=drafter, **drawn
    )


@pytest.mark.recompiled
@pytest.mark.parametrize(
    ("name", "drawn"), representatives(CASES, ("own reading", {}), ("own cache", SAMPLED))
)
def test_output_is_that_of_plain_decoding(name: str, drawn: dict[str, object]) -> None:
    plain = decode(specjax.Autoregressive(), PROMPTS, **drawn)
    ours = decode(DRAFTERS[name], PROMPTS, **drawn)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    for counts in (ours.stats, *ours.levels):
        assert int(counts.accepted.sum()) > 0, "a case that tests nothing"


def test_a_row_alone_has_the_same_output_and_rounds() -> None:
    drafter = DRAFTERS["own reading"]
    together, alone = decode(drafter, PROMPTS), decode(drafter, PROMPTS[1:2])
    width = len(PROMPTS[1]) + NEW
    np.testing.assert_array_equal(alone.tokens[0, :width], together.tokens[1, :width])
    assert int(alone.stats.rounds[0]) == int(together.stats.rounds[1])


@pytest.mark.parametrize("name", representatives(["own reading", "own cache"], "own cache"))
def test_rows_that_others_take_over(name: str) -> None:
    prompts = random_prompts((4, 9, 2, 6), CONFIG.vocab_size, seed=1)
    options = {"max_new_tokens": 9, "rows": 2, "stop_tokens": ()}
    plain, ours = (
        [each.tokens for each in specjax.decode_many(PARAMS, prompts, drafter=drafter, **options)]
        for drafter in (specjax.Autoregressive(), DRAFTERS[name])
    )
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(one, other)


# --- The tree.


def paths_of(proposal: Proposal) -> list[list[tuple[int, ...]]]:
    """The tokens on the path to every node of every row."""
    paths = np.asarray(trees.ancestors(proposal.parents))
    return [
        [tuple(tokens[path[path >= 0]].tolist()) for path in of_row]
        for tokens, of_row in zip(np.asarray(proposal.tokens), paths, strict=True)
    ]


Chances = Callable[[tuple[int, ...]], np.ndarray]


def searched(drafter: DraftTree, chances: Chances) -> list[tuple[int, ...]]:
    """The same by plain search: chances(path) are the probabilities after a path, f32[V]."""
    found: list[tuple[np.float32, tuple[int, ...]]] = []
    leaves = [(np.float32(1), ())]
    for _ in range(drafter.draft.draft_length):
        added = []
        for value, path in leaves:
            after = chances(path)
            for token in np.argsort(-after, kind="stable")[: drafter.width].tolist():
                added.append((value * after[token], (*path, token)))
        found += added
        leaves = sorted(added, key=lambda node: -node[0])[: drafter.width]
    return [path for _, path in sorted(found, key=lambda node: -node[0])[: drafter.nodes]]


@pytest.mark.parametrize("sampling", representatives([None, PENALIZED], PENALIZED), ids=repr)
def test_the_best_nodes_are_proposed_in_every_round(sampling: Sampling | None) -> None:
    """Also after rounds that accepted some: the drafting model reads the text as it is."""
    drafter = DraftTree(DraftModel(CAST, 3), 3, 10)
    drawn = {"sampling": sampling, "key": jax.random.key(1)} if sampling else {}
    asked = Sampling() if sampling is None else sampling

    @jax.jit
    def run(tokens: jax.Array, length: int, seen: jax.Array) -> jax.Array:
        positions, cache = jnp.arange(LONGEST)[None], KVCache.create(CONFIG, 1, LONGEST)
        logits, _ = forward(CAST, tokens[None], positions, cache)
        return probabilities(logits[:, length - 1], asked, Earlier(seen[None]))[0]

    def after(text: list[int]) -> np.ndarray:
        seen = np.isin(np.arange(CONFIG.vocab_size), text)
        return np.asarray(run(np.pad(text, (0, LONGEST - len(text))), len(text), seen))

    state = start(PARAMS, PROMPTS, drafter=drafter, max_new_tokens=NEW, stop_tokens=(), **drawn)
    accepted = 0
    for _ in range(4):
        proposal, state = propose(PARAMS, state, drafter)
        for row, paths in enumerate(paths_of(proposal)):
            text = np.asarray(state.tokens[row, : state.lengths[row]]).tolist()
            assert paths == searched(drafter, lambda path, text=text: after([*text, *path]))
        state, verified = conclude(PARAMS, state, drafter, proposal)
        accepted += int(verified.accepted.sum())
    assert accepted > 0, "a case that tests nothing"


def test_one_child_per_node_is_the_chain() -> None:
    chain, tree = QSpec(3, "a4"), DraftTree(QSpec(3, "a4"), 1, 3)
    expected, found = (
        propose(PARAMS, start(PARAMS, PROMPTS, drafter=each, max_new_tokens=NEW), each)[0]
        for each in (chain, tree)
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.parents, np.tile(np.arange(3) - 1, (3, 1)))


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_of_equals_parents_come_first(value: float) -> None:
    """Sure drafts have values of 1 along a path, and small values underflow."""
    parents = np.array([-1, -1, 0, 0, 1, 1, 2, 2, 4])
    found = _Nodes(*(jnp.asarray(each, jnp.int32)[None] for each in (parents + 7, parents)),
                   jnp.full((1, 9), value))  # fmt: skip
    for nodes in (4, 9):
        best = _best(found, nodes)
        np.testing.assert_array_equal(best.parents[0], parents[:nodes])
        np.testing.assert_array_equal(best.tokens[0], parents[:nodes] + 7)


def test_a_drafting_model_without_numbers_does_no_harm() -> None:
    """It cannot read a few tokens: its logits after them are NaN."""
    plain = decode(specjax.Autoregressive(), PROMPTS)
    unreadable = np.unique(plain.tokens[:, -4:])
    spoilt = dataclasses.replace(CAST, embedding=CAST.embedding.at[unreadable].set(jnp.nan))
    drafter = DraftTree(DraftModel(spoilt, 3, share_cache=True), 2, 5)
    np.testing.assert_array_equal(decode(drafter, PROMPTS).tokens, plain.tokens)


# --- What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be in 1 … 64, got 0"),
        ({"nodes": 1025}, "nodes must be in 1 … 1024, got 1025"),
        ({"nodes": 2.5}, "nodes must be an integer, got 2.5"),
        ({"draft": QSpec(2), "width": 2, "nodes": 7},
         "nodes must be at most 6, all that draft_length=2 and width=2 find, got 7"),
        ({"draft": specjax.NGram()}, r"draft of a DraftTree must draft with a model .*, got NGram"),
        ({"draft": QSpec(confidence=0.5)}, "without schedule and confidence, got QSpec"),
        ({"draft": QSpec(schedule=specjax.Heuristic())}, "without schedule and confidence, got Q"),
    ],
)  # fmt: skip
def test_a_field_out_of_its_range_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(**options)


def test_what_does_not_fit_the_model_is_refused() -> None:
    small = quantized_model(dataclasses.replace(CONFIG, vocab_size=32))
    with pytest.raises(ValueError, match="width must be at most the vocabulary's 32 entries, got"):
        specjax.decode(small, [1, 2], drafter=DraftTree(QSpec(2), 33, 40))
    with pytest.raises(ValueError, match="QSpec drafts with 4-bit weights"):
        specjax.decode(random_model(), [1, 2], drafter=DraftTree())
    with pytest.raises(ValueError, match="draft of a DraftTree must be a drafter such as"):
        specjax.decode(small, [1, 2], drafter=DraftTree("qspec"))
