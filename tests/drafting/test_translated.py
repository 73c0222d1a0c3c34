"""Draft models with another tokenizer: the output stays the same."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import specjax
from checkpoints_tools.tokenizer import Tokenizer
from specjax import Autoregressive, DraftModel, MultiLevel, Sampling, TranslatedDraft
from specjax.generation.decoding import start
from specjax.model.kv_cache import KVCache
from specjax.model.layers import Linear
from specjax.speculation.rounds import step
from tests.support.compiled import forward
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, random_model, random_prompts
from tests.support.small_tokenizers import (
    LLAMA,
    ORDER,
    OTHER,
    PERMUTED,
    TINY,
    letters,
    spelled,
)

NEW = 24
SMALL = dataclasses.replace(CONFIG, vocab_size=TINY.vocab_size, num_layers=1)
TARGET = random_model(SMALL)
PROMPTS = random_prompts((1, 3, 9), TINY.vocab_size)


def _reordered(target: specjax.Params) -> specjax.Params:
    """The model that PERMUTED is the tokenizer of, if TINY is the target's."""
    back = np.argsort(ORDER)
    head = Linear(target.lm_head.weight[back])
    return dataclasses.replace(target, embedding=target.embedding[back], lm_head=head)


TWIN = _reordered(TARGET)
STRANGER = random_model(dataclasses.replace(SMALL, vocab_size=432), seed=3)  # OTHER's, padded

DRAFTERS = {
    "a twin": TranslatedDraft(TWIN, PERMUTED, TINY, 4),
    "a stranger": TranslatedDraft(STRANGER, OTHER, TINY, 3, confidence=0.1),
    "a twin below": MultiLevel(
        DraftModel(specjax.quantize(TARGET, "int8"), 6), TranslatedDraft(TWIN, PERMUTED, TINY, 2)
    ),
    "a twin that forgets": TranslatedDraft(
        TWIN, PERMUTED, TINY, 4, schedule=specjax.Heuristic(), capacity=20
    ),
}


@pytest.fixture(scope="module")
def plain() -> specjax.DecodeResult:
    return specjax.decode(
        TARGET, PROMPTS, max_new_tokens=NEW, drafter=Autoregressive(), stop_tokens=(5,)
    )


@pytest.mark.recompiled
@pytest.mark.parametrize("name", representatives(DRAFTERS, "a twin"))
def test_greedy_output_does_not_change(plain: specjax.DecodeResult, name: str) -> None:
    result = specjax.decode(
        TARGET, PROMPTS, max_new_tokens=NEW, drafter=DRAFTERS[name], stop_tokens=(5,)
    )
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.lengths, plain.lengths)
    rounds = result.stats.rounds
    if name == "a twin":  # never rejected: 24 tokens, 5 a round
        assert (rounds == 5).all() and (result.stats.accepted == result.stats.drafted).all()
    elif name != "a stranger":
        assert (rounds < NEW * 3 / 4).all()


@pytest.mark.exhaustive
def test_a_row_does_not_depend_on_its_neighbours(plain: specjax.DecodeResult) -> None:
    neighbours = random_prompts((1, 5, 9), TINY.vocab_size, seed=4)
    results = [
        specjax.decode(
            TARGET, prompts, max_new_tokens=NEW, drafter=DRAFTERS["a stranger"], stop_tokens=(5,)
        )
        for prompts in (PROMPTS, [neighbours[0], PROMPTS[1], neighbours[2]])
    ]
    first, second = (jax.tree.map(lambda leaf: leaf[1], result) for result in results)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert (results[0].stats.drafted[0] != results[1].stats.drafted[0]).all(), "tests nothing"


def test_the_drafts_cache_is_what_its_model_writes() -> None:
    """Entries of read tokens are the drafting model's, however often the text changed."""
    drafter = DRAFTERS["a stranger"]
    state = start(TARGET, PROMPTS, drafter=drafter, max_new_tokens=NEW)
    for _ in range(5):
        state, _ = step(TARGET, state, drafter)
    read = state.draft
    again = start(
        STRANGER, read.tokens, prompt_lengths=read.cache.lengths + 1, max_new_tokens=1,
        drafter=Autoregressive(), stop_tokens=(),
    )  # fmt: skip
    for row, (filled, length) in enumerate(zip(read.cache.lengths, state.lengths, strict=True)):
        assert filled >= length / 2
        ours, theirs = read.cache.keys[row], again.cache.keys[row]
        np.testing.assert_array_equal(ours[:, :filled], theirs[:, :filled])


@pytest.mark.exhaustive
def test_caches_are_updated_in_place() -> None:
    """A round's temporaries do not grow with the draft's cache."""
    config = dataclasses.replace(SMALL, vocab_size=432, max_position_embeddings=8192)
    draft = random_model(config)

    def temporaries(capacity: int) -> int:
        drafter = TranslatedDraft(draft, OTHER, TINY, 2, capacity=capacity)
        state = start(TARGET, PROMPTS, drafter=drafter, max_new_tokens=8)
        return step.lower(TARGET, state, drafter).compile().memory_analysis().temp_size_in_bytes

    cache = KVCache.create(config, len(PROMPTS), 8192)
    assert temporaries(8192) - temporaries(256) < cache.keys.nbytes / 8


# --- a text known by heart ---


def _by_heart(tokenizer: Tokenizer, text: str) -> tuple[specjax.Params, list[int]]:
    """A model that says `text` over and over, and its tokens. No token may come twice."""
    ids = tokenizer.encode(text, special_tokens=False)
    assert len({*ids}) == len(ids) <= SMALL.hidden_size
    model = random_model(dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size))
    places = np.zeros((tokenizer.vocab_size, SMALL.hidden_size), np.float32)
    places[ids] = np.eye(SMALL.hidden_size)[: len(ids)]
    after = np.zeros_like(places)
    after[np.roll(ids, -1)] = places[ids]
    model = dataclasses.replace(
        model,
        embedding=jnp.asarray(places),
        layers=jax.tree.map(jnp.zeros_like, model.layers),
        lm_head=Linear(jnp.asarray(after)),
    )
    return model, ids


@pytest.mark.parametrize("draft_tokenizer", [OTHER, LLAMA], ids=["byte level", "sentencepiece"])
def test_a_draft_that_knows_the_text_is_accepted(draft_tokenizer: Tokenizer) -> None:
    text = " tomorrow Once behind said; loved mother"
    target, ids = _by_heart(TINY, text)
    draft, others = _by_heart(draft_tokenizer, text)
    assert _cuts(TINY, ids) != _cuts(draft_tokenizer, others), "a case that tests nothing"
    prompts = [ids[:3], ids[5:6]]
    result = specjax.decode(
        target, prompts, max_new_tokens=40,
        drafter=TranslatedDraft(draft, draft_tokenizer, TINY, 6),
    )  # fmt: skip
    for row, begin in enumerate((0, 5)):
        length = int(result.lengths[row])
        expected = [ids[(begin + place) % len(ids)] for place in range(length)]
        assert result.tokens[row, :length].tolist() == expected
    assert result.stats.acceptance_rate > 0.8 and result.stats.tokens_per_round > 2.5


def _cuts(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Returns the places in a text at which its tokens end."""
    return np.cumsum([len(spelled(tokenizer, [index])) for index in ids]).tolist()


# --- sampling ---


FOUR = letters("a b c d")
FIVE = letters("b e a ab c", (("a", "b"),))


LARGE = letters(" ".join(map(chr, range(0x4E00, 0x4E00 + 5000))))


@pytest.mark.exhaustive
def test_samples_have_the_targets_distribution() -> None:
    """Three letters, all 64 outcomes. The draft lacks d, and has tokens that the target lacks."""
    target = random_model(dataclasses.replace(SMALL, vocab_size=4))
    draft = random_model(dataclasses.replace(SMALL, vocab_size=5), seed=1)
    rows, prompt = 2000, [0, 1]
    result = specjax.decode(
        target, np.tile(prompt, (rows, 1)), max_new_tokens=3, stop_tokens=(),
        drafter=TranslatedDraft(draft, FIVE, FOUR, 2), sampling=Sampling(temperature=1.5),
        key=jax.random.key(0),
    )  # fmt: skip
    assert 0.2 < result.stats.token_acceptance < 0.95
    outcomes = np.array(list(itertools.product(range(4), repeat=3)))
    texts = jnp.asarray(np.concatenate((np.tile(prompt, (64, 1)), outcomes), axis=1))
    positions = jnp.broadcast_to(jnp.arange(5), texts.shape)
    logits, _ = forward(target, texts, positions, KVCache.create(target.config, 64, 8))
    chances = np.asarray(jax.nn.softmax(logits[:, 1:4] / 1.5), np.float64)
    expected = np.take_along_axis(chances, outcomes[..., None], axis=2)[..., 0].prod(axis=1)
    seen = np.bincount(np.asarray(result.tokens[:, 2:]) @ [16, 4, 1], minlength=64)
    rare = expected * rows < 8
    counts = [*seen[~rare], seen[rare].sum()], [*expected[~rare], expected[rare].sum()]
    assert stats.chisquare(counts[0], np.array(counts[1]) / expected.sum() * rows).pvalue > 1e-3


def test_a_sampling_twin_is_accepted_but_for_rounding() -> None:
    result = specjax.decode(
        TARGET, PROMPTS, max_new_tokens=NEW, drafter=DRAFTERS["a twin"], stop_tokens=(),
        sampling=Sampling(temperature=0.8), key=jax.random.key(1),
    )  # fmt: skip
    assert result.stats.acceptance_rate > 0.97


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_length": 0}, "draft_length must be at least 1, got 0"),
        ({"confidence": 2}, r"confidence must be in \(0, 1\] or None, got 2"),
        ({"activation": "a2"}, "activation"),
        ({"capacity": 20}, r"capacity must be at least draft_length \+ 16 = 21, got 20"),
        ({"draft_tokenizer": "tiny"}, "draft_tokenizer must be what specjax.load_tokenizer"),
        ({"target_tokenizer": []}, "target_tokenizer must be what specjax.load_tokenizer"),
        ({"params": None}, "params of a TranslatedDraft must be what specjax.load returns"),
        (
            {"draft_tokenizer": TINY},
            "draft_tokenizer must be the draft model's, of at most .* token ids up to 4095",
        ),
        (
            {"params": TARGET, "draft_tokenizer": TINY, "target_tokenizer": LARGE},
            "target_tokenizer must be the target model's, of at most 4096 .* up to 4999",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(options, message) -> None:
    given = {"params": STRANGER, "draft_tokenizer": OTHER, "target_tokenizer": TINY} | options
    with pytest.raises(ValueError, match=message):
        specjax.decode(TARGET, [1], drafter=TranslatedDraft(**given), max_new_tokens=1)


def test_sampling_needs_a_token_in_common() -> None:
    drafter = TranslatedDraft(STRANGER, letters("x y"), letters("a b"))
    with pytest.raises(ValueError, match="none in common"):
        specjax.decode(
            TARGET, [1], drafter=drafter, sampling=Sampling(), key=jax.random.key(0),
            max_new_tokens=1,
        )  # fmt: skip
