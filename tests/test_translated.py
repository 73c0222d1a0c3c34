"""Draft models with another tokenizer: the text stays the same, and so does the output."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import specjax
from checkpoints_tools.tokenizer import Tokenizer
from specjax import Autoregressive, DraftModel, MultiLevel, Sampling, TranslatedDraft
from specjax.decoding import start
from specjax.kv_cache import KVCache
from specjax.params import Linear
from specjax.retokenize import Retokenizer, Speller, translation
from specjax.rounds import step
from specjax.transformer import forward
from tests.random_models import CONFIG, random_model, random_prompts

SOME = settings(max_examples=25, deadline=None)
SENTENCES = (
    "Once upon a time there was a little girl who loved the old garden behind the house.",
    "She was happy, and her mother said that the sun would come out again tomorrow.\n",
    "“Where is the dog?” asked the boy; the dog was under the bed.\n\n  It was 12 o'clock.",
)


def _byte_level(vocab_size: int) -> Tokenizer:
    """Byte-level BPE over other merges than the shipped tokenizer's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<|begin|>"],
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(SENTENCES, trainer)
    return Tokenizer(backend)


def _sentencepiece(vocab_size: int) -> Tokenizer:
    """As Llama 2's: ▁ for a space, one before the text, bytes as <0x00>, and a first token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>"], show_progress=False
    )
    backend.train_from_iterator([text.replace("\n", " ") for text in SENTENCES], trainer)
    model = json.loads(backend.to_str())["model"]
    vocab = model["vocab"] | {f"<0x{i:02X}>": len(model["vocab"]) + i for i in range(256)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend.model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return Tokenizer(backend)


def _permuted(tokenizer: Tokenizer, order: np.ndarray) -> Tokenizer:
    """The same tokens; id i becomes order[i]."""
    written = json.loads(tokenizer._backend.to_str())
    vocab = written["model"]["vocab"]
    written["model"]["vocab"] = {token: int(order[index]) for token, index in vocab.items()}
    for added in written["added_tokens"]:
        added["id"] = int(order[added["id"]])
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(written)))


TINY = specjax.load_tokenizer("tiny")
OTHER = _byte_level(420)
LLAMA = _sentencepiece(300)
ORDER = np.random.default_rng(7).permutation(TINY.vocab_size)
PERMUTED = _permuted(TINY, ORDER)


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


@functools.cache
def _retokenizer(source: Tokenizer, result: Tokenizer) -> Retokenizer:
    return Retokenizer(_speller(source), _speller(result))


@functools.cache
def _speller(tokenizer: Tokenizer) -> Speller:
    return Speller(tokenizer)


def _spelled(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(_speller(tokenizer).tokens[index] for index in ids)


# --- text ---


def test_a_token_is_the_bytes_that_it_adds_to_a_text() -> None:
    text = "".join(SENTENCES) + " é😀\t\0"
    for tokenizer in (TINY, OTHER):
        assert _spelled(tokenizer, tokenizer.encode(text)) == text.encode()
        assert set(range(256)) <= {token[0] for token in tokenizer.vocabulary() if len(token) == 1}
    first, *rest = LLAMA.encode(text)
    assert LLAMA.vocabulary()[first] == "<s>" and _spelled(LLAMA, rest) == b" " + text.encode()
    assert TINY.vocabulary()[0] == "<|endoftext|>"


@pytest.mark.parametrize("source", [TINY, OTHER], ids=["tiny", "other"])
@SOME
@given(st.lists(st.sampled_from([*SENTENCES, "\n", " ", "it", " é😀", "  the old\n\n"])))
def test_a_text_becomes_the_other_tokenizers_own_tokens(source, texts) -> None:
    """Of whatever length: it is read in passages of some 64 tokens."""
    text = "".join(texts)
    result = PERMUTED if source is OTHER else OTHER
    assert _retokenizer(source, result)(_array(source.encode(text))) == result.encode(text)


def test_sentencepiece_writes_a_word_as_within_a_text() -> None:
    text = "\n".join(SENTENCES)
    ids = _retokenizer(TINY, LLAMA)(_array(TINY.encode(text)))
    assert [LLAMA.encode("")[0], *ids] == LLAMA.encode(text)[:1] + LLAMA.encode("\n" + text)[3:]
    assert _retokenizer(LLAMA, TINY)(_array(LLAMA.encode(text)[1:])) == TINY.encode(" " + text)


@SOME
@given(st.lists(st.integers(1, TINY.vocab_size - 1), max_size=300))
def test_no_byte_is_lost(ids) -> None:
    """Also of tokens that no tokenizer would put in a row, and of broken characters."""
    for result in (OTHER, LLAMA):
        translated = _retokenizer(TINY, result)(_array(ids))
        assert _spelled(result, translated) == _spelled(TINY, ids)


@SOME
@given(st.lists(st.integers(0, TINY.vocab_size + 5), max_size=300))
def test_the_same_tokens_stay_the_same(ids) -> None:
    """Ids beyond the tokenizer's, of a padded vocabulary, have no text."""
    expected = [int(ORDER[index]) for index in ids if index < TINY.vocab_size]
    assert _retokenizer(TINY, PERMUTED)(_array(ids)) == expected


def test_a_long_text_loses_its_beginning_by_halves_of_the_room() -> None:
    words = translation(LLAMA, TINY)
    text = _array(TINY.encode("".join(SENTENCES) * 3))
    whole, (count,) = words.read(text[None], [len(text)], room=2000, slots=2000)
    assert count > 100
    for room in (count, count - 1, 40):
        read, (left,) = words.read(text[None], [len(text)], room=room, slots=room)
        dropped = count - left
        assert left <= room and dropped % (room // 2) == 0 and dropped < count - room + room // 2
        assert read[0, 0] == whole[0, 0] == LLAMA.encode("")[0]
        np.testing.assert_array_equal(read[0, 1:left], whole[0, 1 + dropped : count])


@SOME
@given(st.sampled_from(SENTENCES), st.integers(3, 12))
def test_a_draft_continues_what_the_target_wrote(text, cut) -> None:
    """Its text is never changed; where it begins a new word, its tokens are the target's own."""
    words = translation(OTHER, TINY)
    ids = TINY.encode(text)
    rest = _spelled(TINY, ids[cut:])
    drafted = _retokenizer(TINY, OTHER)(_array(ids[cut:]))
    continued = words._continue(_array(ids[:cut]), _array(drafted))
    assert _spelled(TINY, continued) == rest
    if rest.startswith(b" "):
        assert continued == ids[cut:]


def test_a_word_that_the_target_began_is_finished_as_the_target_would() -> None:
    """ " tomorrow" is " tom", "orrow" to the target, whatever the draft's tokens are."""
    words = translation(OTHER, TINY)
    (whole,) = OTHER.encode(" tomorrow")
    tom, orrow = TINY.encode(" tomorrow")
    assert _spelled(TINY, [tom]) == b" tom"
    assert words._continue(_array([tom]), _array(OTHER.encode("orrow"))) == [orrow]
    assert words._continue(_array(TINY.encode("again")), _array([whole])) == [tom, orrow]


# --- decoding ---

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


@pytest.mark.parametrize("name", DRAFTERS)
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
    """However often the text changed: entries of tokens read are the drafting model's."""
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
        for ours, theirs in zip(read.cache.keys, again.cache.keys, strict=True):
            np.testing.assert_array_equal(ours[row, :filled], theirs[row, :filled])


def test_caches_are_updated_in_place() -> None:
    """A round's temporaries do not grow with the draft's cache."""
    config = dataclasses.replace(SMALL, vocab_size=432, max_position_embeddings=8192)
    draft = random_model(config)

    def temporaries(capacity: int) -> int:
        drafter = TranslatedDraft(draft, OTHER, TINY, 2, capacity=capacity)
        state = start(TARGET, PROMPTS, drafter=drafter, max_new_tokens=8)
        return step.lower(TARGET, state, drafter).compile().memory_analysis().temp_size_in_bytes

    cache = KVCache.create(config, len(PROMPTS), 8192)
    assert temporaries(8192) - temporaries(256) < cache.keys[0].nbytes / 8


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
    """Where in a text its tokens end."""
    return np.cumsum([len(_spelled(tokenizer, [index])) for index in ids]).tolist()


# --- sampling ---


def _letters(vocab: str, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """A byte-level tokenizer of a few tokens."""
    ids = {token: index for index, token in enumerate(vocab.split())}
    backend = tokenizers.Tokenizer(models.BPE(ids, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


FOUR = _letters("a b c d")
FIVE = _letters("b e a ab c", (("a", "b"),))


LARGE = _letters(" ".join(map(chr, range(0x4E00, 0x4E00 + 5000))))


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
            "draft_tokenizer has token ids up to 4095, and the draft model",
        ),
        (
            {"params": TARGET, "draft_tokenizer": TINY, "target_tokenizer": LARGE},
            "target_tokenizer has token ids up to 4999, and the target model a vocabulary of 4096",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(options, message) -> None:
    given = {"params": STRANGER, "draft_tokenizer": OTHER, "target_tokenizer": TINY} | options
    with pytest.raises(ValueError, match=message):
        specjax.decode(TARGET, [1], drafter=TranslatedDraft(**given), max_new_tokens=1)


def test_sampling_needs_a_token_in_common() -> None:
    drafter = TranslatedDraft(STRANGER, _letters("x y"), _letters("a b"))
    with pytest.raises(ValueError, match="none in common"):
        specjax.decode(
            TARGET, [1], drafter=drafter, sampling=Sampling(), key=jax.random.key(0),
            max_new_tokens=1,
        )  # fmt: skip


def test_unreadable_tokens_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    with pytest.raises(ValueError, match="writes its tokens in an unknown way"):
        Tokenizer(backend).vocabulary()
