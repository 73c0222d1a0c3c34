"""Drafts from models: the promise holds for each of them, alone and on top of each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.quantization import quantize
from specjax import (
    Adaptive,
    DraftModel,
    DraftTree,
    Heuristic,
    LayerSkip,
    MultiLevel,
    PromptLookup,
    Spectra,
)
from specjax.generation.decoding import start
from specjax.model.kv_cache import KVCache
from specjax.model.layers import Linear
from specjax.model.transformer import CHUNK, prefill, prefill_in_chunks
from specjax.speculation.rounds import step
from tests.support import small_tokenizers
from tests.support.compiled import forward
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, random_model, random_prompts

TARGET = random_model(CONFIG)
INT4 = quantize(TARGET, "rtn", group_size=32)
MXFP4 = quantize(TARGET, "mxfp4")
INT8 = quantize(TARGET, "int8")


def _smaller(target: specjax.Params) -> specjax.Params:
    """The first of the target's layers, and a vocabulary padded to another size."""
    pad = ((0, 4), (0, 0))
    return dataclasses.replace(
        target,
        embedding=jnp.pad(target.embedding, pad),
        layers=target.layers[:1],
        lm_head=Linear(jnp.pad(target.lm_head.weight, pad, constant_values=9.0)),
        config=dataclasses.replace(CONFIG, num_layers=1, vocab_size=CONFIG.vocab_size + 4),
    )


OTHER = _smaller(TARGET)
PROMPTS = random_prompts((1, 3, 7, 12), CONFIG.vocab_size)
NEW = 24

DRAFTERS = {
    "a cast": DraftModel(MXFP4),
    "a cast that shares the cache": DraftModel(INT4, share_cache=True),
    "a cast that is as good as the target": DraftModel(TARGET, 4),
    "another model": DraftModel(OTHER, 2),
    "confidence": DraftModel(INT8, 8, confidence=0.4),
    "heuristic": DraftModel(INT8, 9, schedule=Heuristic()),
    "adaptive": DraftModel(INT4, 9, share_cache=True, schedule=Adaptive(), confidence=0.2),
    "skipping": LayerSkip((0,)),
    "a window": DraftModel(INT8, 6, share_cache=True, window=5),
    "a window over its own cache": DraftModel(INT8, 6, window=5),
    "windows of two levels": MultiLevel(
        DraftModel(INT8, 6, share_cache=True, window=9), LayerSkip((0,), 2, window=3)
    ),
    "a tree": DraftTree(DraftModel(OTHER, 3), 3, 7),
    "two levels": MultiLevel(DraftModel(INT8, 6), DraftModel(MXFP4, 2)),
    "two levels in one cache": MultiLevel(
        DraftModel(INT8, 6, confidence=0.2, share_cache=True), LayerSkip((0,), 2)
    ),
    "three levels": MultiLevel.of(
        [DraftModel(INT8, 6, schedule=Heuristic()), DraftModel(MXFP4, 3), DraftModel(OTHER, 2)]
    ),
    "a level with its own below one without": MultiLevel.of(
        [DraftModel(INT8, 5, share_cache=True), DraftModel(INT4, 3), DraftModel(MXFP4, 2)]
    ),
}


@pytest.fixture(scope="module")
def plain() -> specjax.DecodeResult:
    return specjax.decode(TARGET, PROMPTS, max_new_tokens=NEW, drafter=specjax.Autoregressive())


@pytest.mark.recompiled
@pytest.mark.parametrize(
    "name", representatives(DRAFTERS, "a cast", "two levels in one cache", "windows of two levels")
)
def test_greedy_output_does_not_change(plain: specjax.DecodeResult, name: str) -> None:
    result = specjax.decode(TARGET, PROMPTS, max_new_tokens=NEW, drafter=DRAFTERS[name])
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.lengths, plain.lengths)
    assert (np.asarray(result.stats.rounds) < NEW).any(), "nothing was ever accepted"
    assert (result.stats.accepted <= result.stats.drafted).all()


@pytest.mark.parametrize(
    "name", representatives(["a cast", "two levels", "three levels"], "two levels")
)
def test_a_drafts_own_cache_is_what_its_model_writes(name: str) -> None:
    """Entries of committed tokens are the drafting model's, however many drafts were rejected. They
    lack the last token, and at most one more per level."""
    drafter = DRAFTERS[name]
    state = start(TARGET, PROMPTS, drafter=drafter, max_new_tokens=NEW)
    for _ in range(5):
        state, _ = step(TARGET, state, drafter)
        levels = list(_levels(drafter, state.draft))
        for lacking, (params, cache) in enumerate(levels, start=2):
            again = start(
                params, state.tokens, prompt_lengths=state.lengths, max_new_tokens=1,
                drafter=specjax.Autoregressive(),
            )  # fmt: skip
            filled = np.minimum(cache.lengths, state.lengths - 1)
            assert (filled >= state.lengths - lacking).all()
            for ours, theirs, length in zip(cache.keys, again.cache.keys, filled, strict=True):
                np.testing.assert_array_equal(ours[:, :length], theirs[:, :length])


def _levels(drafter: Any, draft: Any) -> Iterator[tuple[specjax.Params, KVCache]]:
    """The models of a drafter's levels, all with caches of their own."""
    while isinstance(drafter, MultiLevel):
        yield drafter.outer.params, draft.outer.cache
        drafter, draft = drafter.inner, draft.inner
    yield drafter.params, draft.cache


def test_a_text_has_the_same_entries_in_chunks() -> None:
    """The rows' own, however wide the array of their tokens is."""
    lengths = jnp.array([2, CHUNK + 5], jnp.int32)
    tokens = jnp.asarray(random_prompts((4 * CHUNK - 3,) * 2, CONFIG.vocab_size))
    empty = KVCache.create(CONFIG, *tokens.shape)
    whole, pieces = (
        prefill(TARGET, tokens, empty), prefill_in_chunks(TARGET, tokens, lengths, empty)
    )  # fmt: skip
    np.testing.assert_array_equal(pieces.lengths, lengths)
    for ours, theirs in ((pieces.keys, whole.keys), (pieces.values, whole.values)):
        for row, length in enumerate(lengths.tolist()):
            np.testing.assert_array_equal(ours[row, :, :length], theirs[row, :, :length])
        assert not np.asarray(ours)[:, :, 2 * CHUNK :].any(), "read beyond the longest text"


def test_a_draft_equal_to_the_target_is_never_rejected() -> None:
    """Also across levels: the expected counts, exactly. 24 tokens, 5 a round: 4 · 5 + 4."""
    drafters = (DraftModel(TARGET, 4), MultiLevel(DraftModel(TARGET, 4), DraftModel(TARGET, 1)))
    for drafter in drafters:
        result = specjax.decode(TARGET, PROMPTS, max_new_tokens=NEW, drafter=drafter)
        assert (result.stats.rounds == 5).all()
        assert (result.stats.accepted == 4 * result.stats.rounds).all()
    (level,) = result.levels
    assert (level.generated == result.stats.drafted).all()
    assert (level.rounds == 2 * result.stats.rounds).all()  # two tokens each: 4 drafts
    assert (level.accepted == level.drafted).all()


def test_a_window_hides_the_context_from_the_draft_alone() -> None:
    def kept(window: int | None) -> tuple[int, int]:
        drafter = DraftModel(TARGET, 4, share_cache=True, window=window)
        stats = specjax.decode(TARGET, PROMPTS, max_new_tokens=NEW, drafter=drafter).stats
        return int(stats.accepted.sum()), int(stats.drafted.sum())

    assert kept(1000) == kept(None) == (80, 80)  # as above
    accepted, drafted = kept(2)
    assert accepted < drafted


def test_a_window_leaves_the_first_and_the_last_positions() -> None:
    """Which slots of 20 the token at position 20 sees: those whose entries change its logits."""
    tokens = jnp.asarray(random_prompts((20,), CONFIG.vocab_size)[0])[None]
    cache = prefill(TARGET, tokens, KVCache.create(CONFIG, 1, 21))
    cache = cache.with_lengths(jnp.array([20])).with_window(3)

    def logits(slot: int) -> np.ndarray:
        changed = dataclasses.replace(cache, values=cache.values.at[:, :, slot].add(1.0))
        return np.asarray(forward(TARGET, tokens[:, :1], jnp.array([[20]]), changed)[0])

    whole = logits(21)  # behind what is in use
    seen = [slot for slot in range(20) if (logits(slot) != whole).any()]
    assert seen == [0, 1, 2, 3, 18, 19]


def test_a_drafter_that_is_always_wrong_costs_rounds_and_nothing_else(plain) -> None:
    """A draft model whose head is turned upside down: every level makes one token per round."""
    head = TARGET.lm_head.weight
    wrong = dataclasses.replace(TARGET, lm_head=dataclasses.replace(TARGET.lm_head, weight=-head))
    drafter = MultiLevel(DraftModel(wrong, 3), DraftModel(TARGET, 2))
    result = specjax.decode(TARGET, PROMPTS, max_new_tokens=NEW, drafter=drafter)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert (result.stats.rounds == NEW).all() and (result.stats.accepted == 0).all()
    (level,) = result.levels
    assert (level.accepted == 0).all() and (level.rounds == 3 * result.stats.rounds).all()


@pytest.mark.parametrize(
    ("skipped", "layers"),
    [("first half", (2, 3, 4)), ("last half", (0, 1)), ("alternate", (1, 3))],
)
def test_layers_that_need_no_search(skipped: str, layers: tuple[int, ...]) -> None:
    five = random_model(dataclasses.replace(CONFIG, num_layers=5))
    drafter = LayerSkip.skipping(five, skipped, draft_length=2)
    assert drafter == LayerSkip(layers, draft_length=2)
    drafter.validate(five, 100)


def test_layers_that_cannot_be_skipped() -> None:
    message = "skipped must be one of first half, last half, alternate, got 'even'"
    with pytest.raises(ValueError, match=message):
        LayerSkip.skipping(TARGET, "even")
    one = random_model(dataclasses.replace(CONFIG, num_layers=1))
    with pytest.raises(ValueError, match=r"layers must be rising layer numbers, at least one"):
        LayerSkip.skipping(one, "alternate")


def test_ml_specqds_settings() -> None:
    outer, inner = DraftModel(MXFP4, share_cache=True), DraftModel(OTHER, 2)
    papers = MultiLevel.paper(outer, inner)
    assert (papers.outer.draft_length, papers.outer.confidence) == (8, 0.4)
    assert papers.outer.share_cache
    assert (papers.inner.draft_length, papers.inner.confidence) == (8, 0.4)
    translated = specjax.TranslatedDraft(OTHER, small_tokenizers.OTHER, small_tokenizers.TINY)
    assert MultiLevel.paper(outer, translated).inner.confidence == 0.65
    with pytest.raises(ValueError, match="inner must draft with a model, got NGram"):
        MultiLevel.paper(outer, specjax.NGram())


def test_a_shared_cache_adds_no_bytes() -> None:
    def state_bytes(drafter: specjax.Drafter) -> int:
        state = start(TARGET, PROMPTS, max_new_tokens=NEW, drafter=drafter, cache_capacity=128)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    shared = state_bytes(DraftModel(INT4, share_cache=True))
    assert shared == state_bytes(specjax.Autoregressive())
    assert state_bytes(DraftModel(INT4)) > 1.9 * shared


@pytest.mark.exhaustive
def test_an_unsure_draft_ends_at_once() -> None:
    """confidence=1: only certain tokens go on, so rounds draft one token each."""
    drafter = DraftModel(OTHER, 6, confidence=1.0)
    result = specjax.decode(TARGET, PROMPTS, max_new_tokens=NEW, drafter=drafter)
    assert (result.stats.drafted == result.stats.rounds).all()


@pytest.mark.parametrize("inner", [PromptLookup(3), Spectra(3, 2, 2, capacity=64)], ids=type)
@pytest.mark.exhaustive
def test_what_drafts_for_a_level_does_not_move_its_end(inner: specjax.Drafter) -> None:
    """A level with confidence ends its drafts at the tokens at which its model alone does."""
    outer = DraftModel(INT8, 6, confidence=0.3)
    alone, level = (
        specjax.decode(TARGET, PROMPTS, max_new_tokens=NEW, drafter=drafter).stats
        for drafter in (outer, MultiLevel(outer, inner))
    )
    jax.tree.map(np.testing.assert_array_equal, alone, level)
    drafted, rounds = alone.drafted.sum(), alone.rounds.sum()
    assert rounds < drafted < 5 * rounds, "a case that tests nothing"


@pytest.mark.parametrize(
    "name", representatives(["a cast", "adaptive", "two levels", "a tree"], "a cast")
)
def test_caches_are_updated_in_place(name: str) -> None:
    """A round's temporaries do not grow with the caches, also where the pass has several widths."""
    drafter = DRAFTERS[name]

    def temporaries(capacity: int) -> int:
        state = start(TARGET, PROMPTS, drafter=drafter, max_new_tokens=8, cache_capacity=capacity)
        return step.lower(TARGET, state, drafter).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048) <= temporaries(256) + 4096
