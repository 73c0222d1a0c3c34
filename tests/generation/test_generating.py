"""Texts in, texts out: shapes of what goes in and comes out; the tokens are those of `decode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import pytest

import specjax
from specjax import Generation, Sampling
from tests.support.random_models import CONFIG, quantized_model
from tests.support.word_tokenizer import WordTokenizer

PARAMS = quantized_model()
TEXTS = ["w5 w6 w7", "w70 w2", "w9"]
TALK = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
HOT = Sampling(temperature=0.9)
OPTIONS = {"max_new_tokens": 12, "rows": 2}


class Talker(WordTokenizer):
    """With a chat template: the contents, between tokens that a text does not have."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        ids = [1 if word == "</s>" else int(word[1:]) for word in text.split()]
        return [0, *ids] if special_tokens else ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if any(message["role"] == "tool" for message in messages):
            raise ValueError("the template knows no tools")
        return "".join(f" {message['content']} </s>" for message in messages)


TOKENIZER = Talker(CONFIG.vocab_size)


def _decoded(ids: list[int], **options: object) -> list[int]:
    """Returns the tokens that `decode` adds to a prompt."""
    result = specjax.decode(PARAMS, ids, max_new_tokens=12, **options)
    return np.asarray(result.tokens)[0, len(ids) : int(result.lengths[0])].tolist()


def _generate(texts: object, **options: object) -> Generation:
    return specjax.generate(PARAMS, TOKENIZER, texts, **OPTIONS, **options)


@pytest.fixture(scope="module")
def plain() -> list[Generation]:
    return _generate(TEXTS)


def test_many_texts(plain) -> None:
    for text, each in zip(TEXTS, plain, strict=True):
        assert each.tokens.tolist() == _decoded(TOKENIZER.encode(text))
        assert each.text == " " + TOKENIZER.decode(each.tokens)
        assert (each.finish, each.error, each.logprobs) == ("length", None, None)
        assert int(each.stats.generated) == 12


def test_one_text(plain) -> None:
    each = _generate(TEXTS[1])
    assert isinstance(each, Generation)
    assert (each.text, each.tokens.tolist()) == (plain[1].text, plain[1].tokens.tolist())


def test_conversations_go_through_the_template() -> None:
    """Which writes the special tokens itself."""
    expected = _decoded([5, 6, 1, 7, 1])
    assert _generate(TALK).tokens.tolist() == expected
    first, second = _generate([TALK[:1], TALK])
    assert second.tokens.tolist() == expected
    assert first.tokens.tolist() == _decoded([5, 6, 1])


def test_what_cannot_be_decoded_stops_no_other(plain) -> None:
    texts = [TEXTS[0], "w5 " * 600, [{"role": "tool", "content": ""}], 7, [], TEXTS[2]]
    results = _generate(texts)
    assert results[0].text == plain[0].text and results[5].text == plain[2].text
    for each, error in zip(
        results[1:5],
        ("512 positions", "knows no tools", "a prompt must be a text, or a conv", "is empty"),
        strict=True,
    ):
        assert error in each.error
        assert (each.text, each.tokens.tolist(), each.finish) == ("", [], "error")
    for text, result in zip(texts[1:3], results[1:3], strict=True):
        with pytest.raises(ValueError) as caught:
            _generate(text)
        assert str(caught.value) == result.error


def test_a_stop_token_ends_the_text_and_is_a_token(plain) -> None:
    tokens = plain[0].tokens.tolist()
    stop = tokens[6]
    each = _generate(TEXTS[0], stop_tokens=[stop], logprobs=0)
    end = tokens.index(stop)
    assert each.tokens.tolist() == tokens[: end + 1]
    words = [token for token in tokens[:end] if token > 1]  # the others are special
    assert each.text == "".join(f" w{token}" for token in words)
    assert each.finish == "stop"
    assert each.logprobs.tokens.shape == (end + 1,)


def test_a_stop_text_ends_the_text(plain) -> None:
    """Within the token that completes it."""
    whole = plain[0].text
    stop = whole.split()[5][-2:] + " "
    results = _generate(TEXTS[:2], stop=["no such text", stop], logprobs=1)
    for each, expected in zip(results, plain, strict=False):
        found = stop in expected.text
        assert each.text == expected.text.partition(stop)[0]
        assert each.finish == ("stop" if found else "length")
        count = len(each.tokens)
        assert each.tokens.tolist() == expected.tokens[:count].tolist()
        assert each.logprobs.top_tokens.shape == (count, 1)
    assert len(results[0].tokens) < 12


@pytest.mark.parametrize("drafter", [specjax.Autoregressive(), specjax.QSpec()], ids=repr)
@pytest.mark.exhaustive
def test_samples_do_not_depend_on_their_company(drafter) -> None:
    """Nor on how many there are; sample j is that of `decode` with the key folded j times."""
    key = jax.random.key(4)
    options = {"sampling": HOT, "drafter": drafter}
    many = _generate(TEXTS, samples=3, key=key, **options)
    assert [len(each) for each in many] == [3, 3, 3]
    assert len({tuple(each.tokens.tolist()) for each in many[0]}) == 3
    (alone,) = _generate(TEXTS[0], samples=1, key=key, **options)
    assert alone.tokens.tolist() == many[0][0].tokens.tolist()
    own = jax.random.fold_in(key, 1)
    (first, second), *_ = _generate([TEXTS[1]], samples=2, key=own[None], **options)
    assert first.tokens.tolist() == many[1][0].tokens.tolist()
    folded = jax.random.fold_in(own, 1)[None]
    expected = _decoded(TOKENIZER.encode(TEXTS[1]), key=folded, **options)
    assert second.tokens.tolist() == many[1][1].tokens.tolist() == expected


@pytest.mark.exhaustive
def test_without_samples_the_key_is_decode_manys() -> None:
    options = {"sampling": HOT, "key": jax.random.key(5)}
    prompts = [TOKENIZER.encode(text) for text in TEXTS]
    expected = specjax.decode_many(PARAMS, prompts, **OPTIONS, **options)
    for prompt, each, completion in zip(
        prompts, _generate(["", *TEXTS][1:], **options), expected, strict=True
    ):
        assert each.tokens.tolist() == completion.tokens[len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": []}, "texts must hold at least one text or conversation, got none"),
        ({"texts": 5}, "texts must be a text, or a conversation: .* or a list of them, got 5"),
        ({"texts": {"role": "user"}}, "texts must be a text, or a conversation"),
        ({"stop": "end"}, "stop must be a list of texts that are not empty, got 'end'"),
        ({"stop": ["a", ""]}, "stop must be a list of texts that are not empty"),
        ({"stop": None}, "stop must be a list of texts that are not empty, got None"),
        ({"samples": 2}, "samples goes with sampling"),
        ({"samples": 0, "sampling": HOT}, "samples must be at least 1 or None, got 0"),
        ({"samples": 1.5, "sampling": HOT}, "samples must be an integer, got 1.5"),
        ({"sampling": HOT}, "sampling needs key"),
        ({"key": jax.random.key(0)}, "key goes with sampling"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"logprobs": -1}, "logprobs must be in 0 … 96 or None, got -1"),
        ({"texts": TALK, "tokenizer": WordTokenizer(96)}, "needs a tokenizer with a chat template"),
        ({"params": None}, "params must be what specjax.load returns"),
    ],
)
def test_bad_input_gets_one_clear_sentence(change: dict[str, object], message: str) -> None:
    arguments = {"params": PARAMS, "tokenizer": TOKENIZER, "texts": TEXTS, **change}
    with pytest.raises(ValueError, match=message):
        specjax.generate(**arguments)
