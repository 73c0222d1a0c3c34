"""Text between tokenizers: no byte is lost, and every token is the other tokenizer's own."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from checkpoints_tools.tokenizer import Tokenizer
from specjax.drafting.retokenize import translation
from tests.support.small_tokenizers import (
    LLAMA,
    ORDER,
    OTHER,
    PERMUTED,
    SENTENCES,
    TINY,
    array,
    retokenizer,
    spelled,
)

SOME = settings(max_examples=25, deadline=None)


def test_a_token_is_the_bytes_that_it_adds_to_a_text() -> None:
    text = "".join(SENTENCES) + " é😀\t\0"
    for tokenizer in (TINY, OTHER):
        assert spelled(tokenizer, tokenizer.encode(text)) == text.encode()
        assert set(range(256)) <= {token[0] for token in tokenizer.vocabulary() if len(token) == 1}
    first, *rest = LLAMA.encode(text)
    assert LLAMA.vocabulary()[first] == "<s>" and spelled(LLAMA, rest) == b" " + text.encode()
    assert TINY.vocabulary()[0] == "<|endoftext|>"


@pytest.mark.parametrize("source", [TINY, OTHER], ids=["tiny", "other"])
@SOME
@given(st.lists(st.sampled_from([*SENTENCES, "\n", " ", "it", " é😀", "  the old\n\n"])))
def test_a_text_becomes_the_other_tokenizers_own_tokens(source, texts) -> None:
    """A text may have any length: it is read in passages of some 64 tokens."""
    text = "".join(texts)
    result = PERMUTED if source is OTHER else OTHER
    assert retokenizer(source, result)(array(source.encode(text))) == result.encode(text)


def test_sentencepiece_writes_a_word_as_within_a_text() -> None:
    text = "\n".join(SENTENCES)
    ids = retokenizer(TINY, LLAMA)(array(TINY.encode(text)))
    assert [LLAMA.encode("")[0], *ids] == LLAMA.encode(text)[:1] + LLAMA.encode("\n" + text)[3:]
    assert retokenizer(LLAMA, TINY)(array(LLAMA.encode(text)[1:])) == TINY.encode(" " + text)


@SOME
@given(st.lists(st.integers(1, TINY.vocab_size - 1), max_size=300))
def test_no_byte_is_lost(ids) -> None:
    """Also of tokens that no tokenizer would put in a row, and of broken characters."""
    for result in (OTHER, LLAMA):
        translated = retokenizer(TINY, result)(array(ids))
        assert spelled(result, translated) == spelled(TINY, ids)


@SOME
@given(st.lists(st.integers(0, TINY.vocab_size + 5), max_size=300))
def test_the_same_tokens_stay_the_same(ids) -> None:
    """Ids beyond the tokenizer's, of a padded vocabulary, have no text."""
    expected = [int(ORDER[index]) for index in ids if index < TINY.vocab_size]
    assert retokenizer(TINY, PERMUTED)(array(ids)) == expected


def test_a_long_text_loses_its_beginning_by_halves_of_the_room() -> None:
    words = translation(LLAMA, TINY)
    text = array(TINY.encode("".join(SENTENCES) * 3))
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
    rest = spelled(TINY, ids[cut:])
    drafted = retokenizer(TINY, OTHER)(array(ids[cut:]))
    continued = words._continue(array(ids[:cut]), array(drafted))
    assert spelled(TINY, continued) == rest
    if rest.startswith(b" "):
        assert continued == ids[cut:]


def test_a_word_that_the_target_began_is_finished_as_the_target_would() -> None:
    """ " tomorrow" is " tom", "orrow" to the target, whatever the draft's tokens are."""
    words = translation(OTHER, TINY)
    (whole,) = OTHER.encode(" tomorrow")
    tom, orrow = TINY.encode(" tomorrow")
    assert spelled(TINY, [tom]) == b" tom"
    assert words._continue(array([tom]), array(OTHER.encode("orrow"))) == [orrow]
    assert words._continue(array(TINY.encode("again")), array([whole])) == [tom, orrow]


def test_unreadable_tokens_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    with pytest.raises(ValueError, match="writes its tokens in an unknown way"):
        Tokenizer(backend).vocabulary()
