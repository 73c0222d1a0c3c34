"""Text: streaming shows what decoding returns, and a broken character is never shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import specjax
from specjax.generation.text import TextStream
from specjax.speculation.rounds import step
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model

PROMPT = [72, 33, 44]


class ByteTokenizer:
    """One token per byte, as far as a vocabulary of 96 goes."""

    def encode(self, text: str) -> list[int]:
        return [byte % CONFIG.vocab_size for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.fixture(scope="module")
def params() -> specjax.Params:
    return quantized_model()


@pytest.fixture(scope="module")
def decoded(params: specjax.Params) -> specjax.DecodeResult:
    return specjax.decode(params, PROMPT, max_new_tokens=21, drafter=specjax.QSpec(4, "a4"))


def test_stream_yields_what_decode_returns(params, decoded) -> None:
    drafter = specjax.QSpec(4, "a4")
    rounds = list(specjax.stream(params, PROMPT, max_new_tokens=21, drafter=drafter))
    tokens = [token for each in rounds for token in each.tokens]
    assert PROMPT + tokens == np.asarray(decoded.tokens[0]).tolist()
    assert len(rounds) == int(decoded.stats.rounds[0])
    drafted = sum(len(each.accepted) + len(each.rejected) for each in rounds[:-1])
    assert drafted == 4 * (len(rounds) - 1)
    assert any(each.rejected for each in rounds), "a case that tests nothing"
    assert all(len(each.given) == 1 for each in rounds[:-1])


def test_generate_returns_the_continuation(params) -> None:
    tokenizer = ByteTokenizer()
    text = specjax.generate(params, tokenizer, "AB", max_new_tokens=9)
    expected = specjax.decode(params, tokenizer.encode("AB"), max_new_tokens=9).tokens[0, 2:]
    assert text == tokenizer.decode(np.asarray(expected).tolist())


def test_generate_leaves_the_stop_token_out(params, decoded) -> None:
    class Identity(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return PROMPT

    stop = int(decoded.tokens[0, len(PROMPT) + 4])
    text = specjax.generate(
        params, Identity(), "", max_new_tokens=21, stop_tokens=(stop,), drafter=specjax.QSpec()
    )
    generated = np.asarray(decoded.tokens[0, len(PROMPT) :]).tolist()
    assert text == Identity().decode(generated[: generated.index(stop)])


def test_a_character_of_several_tokens_appears_once_it_is_whole() -> None:
    stream = TextStream(ByteTokenizer(), [65])
    shown = [stream.push([byte]) for byte in "é😀b".encode()]
    assert shown == ["", "é", "", "", "", "😀", "b"]
    assert stream.push([255]) == "" and stream.push([99]) == "\ufffdc"
    assert stream.push([255]) == "" and stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_prompt_may_end_within_a_character() -> None:
    first, *rest = "é".encode()
    stream = TextStream(ByteTokenizer(), [65, first])
    assert stream.push(rest) == "é"


def test_a_stream_ends_before_the_first_of_its_stops() -> None:
    stream = TextStream(ByteTokenizer(), [65], ("\n\n", "bcd"))
    assert "".join(stream.push([byte]) for byte in b"a\nb\nbce\n\nf") == "a\nb\nbce"
    assert stream.ended
    assert stream.peek([97]) == "" and stream.finish() == ""


def test_what_may_begin_a_stop_waits() -> None:
    stream = TextStream(ByteTokenizer(), [65], ("bcd",))
    assert [stream.push([byte]) for byte in b"abcbc"] == ["a", "", "", "bc", ""]
    assert not stream.ended and stream.finish() == "bc"


def test_peek_shows_and_changes_nothing() -> None:
    stream = TextStream(ByteTokenizer(), list(range(65, 90)))
    assert stream.peek([97, 98]) == "ab" and stream.peek([]) == ""
    assert stream.push([99]) == "c"


def test_stream_rejects_bad_input_at_the_call(params) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        specjax.stream(params, [])
    with pytest.raises(ValueError, match="prompt is empty"):
        specjax.generate(params, ByteTokenizer(), "")
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        specjax.stream(params, PROMPT, max_new_tokens=0)
    with pytest.raises(ValueError, match="max_new_tokens must be an integer"):
        specjax.stream(params, PROMPT, max_new_tokens="many")
    for tokens in ([PROMPT, PROMPT], [1.5], "text"):
        with pytest.raises(ValueError, match=r"prompt must be an integer|prompt must be a list"):
            specjax.stream(params, tokens)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        specjax.stream(params, [*PROMPT, CONFIG.vocab_size])
    with pytest.raises(ValueError, match="params must be"):
        specjax.stream(None, PROMPT)


@pytest.mark.exhaustive
def test_prompts_of_like_length_share_their_programs(params) -> None:
    def tokens(prompt: list[int]) -> list[int]:
        rounds = specjax.stream(params, prompt, max_new_tokens=11)
        return prompt + [token for each in rounds for token in each.tokens]

    tokens(PROMPT)
    compiled = step._cache_size()
    longer = (PROMPT * 11)[:32]
    streamed = tokens(longer)
    assert step._cache_size() == compiled
    expected = specjax.decode(params, longer[:31], max_new_tokens=11).tokens[0]
    assert tokens(longer[:31]) == np.asarray(expected).tolist()
    assert len(streamed) == 32 + 11 and len(tokens((PROMPT * 11)[:33])) == 33 + 11
    assert step._cache_size() > compiled, "a case that tests nothing"


@pytest.mark.parametrize("length", representatives([481, 490, 500], 490))
def test_padding_leaves_room_for_the_output(params, length) -> None:
    prompt = (PROMPT * 200)[:length]
    room = CONFIG.max_position_embeddings - length
    rounds = list(specjax.stream(params, prompt, max_new_tokens=room))
    assert sum(len(each.tokens) for each in rounds) == room
    with pytest.raises(ValueError, match=f"prompt of {length} tokens and max_new_tokens"):
        specjax.stream(params, prompt, max_new_tokens=room + 1)
