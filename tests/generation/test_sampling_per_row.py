"""Numbers of `Sampling` are traced: one per row, inside jit, and never compiled anew."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import specjax
from tests.support.random_models import CONFIG, quantized_model, random_prompts
from tests.support.word_tokenizer import WordTokenizer

PARAMS = quantized_model()
PROMPTS = random_prompts((5, 3, 4), CONFIG.vocab_size)
KEY = jax.random.key(3)
FIELDS = {
    "temperature": (0.4, 1.0, 30.0), "top_k": (40, 1, 2**31), "top_p": (0.5, 1.0, 0.9),
    "min_p": (0.0, 0.2, 0.01), "repetition_penalty": (1.0, 0.5, 3.0),
    "presence_penalty": (0.0, 2.0, -1.5), "frequency_penalty": (0.5, -2.0, 0.0),
    "logit_bias": ({4: 2.5}, {7: -100, 8: 9}, {}),
}  # fmt: skip
FIRST = {name: each[0] for name, each in FIELDS.items()}
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "stop_tokens": (), "drafter": specjax.QSpec(2)}


def _of_row(row: int) -> specjax.Sampling:
    return specjax.Sampling(**{name: each[row] for name, each in FIELDS.items()})


def _of_all() -> specjax.Sampling:
    numbers = {name: np.array(each) for name, each in FIELDS.items() if name != "logit_bias"}
    return specjax.Sampling(**numbers, logit_bias=FIELDS["logit_bias"])


def _decoded(sampling: specjax.Sampling) -> np.ndarray:
    result = specjax.decode(PARAMS, PROMPTS, sampling=sampling, key=KEY, **OPTIONS)
    return np.asarray(result.tokens)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """Each row as all rows with its own numbers decode it."""
    rows = [_decoded(_of_row(row))[row] for row in range(len(PROMPTS))]
    assert not np.array_equal(_decoded(_of_row(0))[2], rows[2])
    return rows


def test_rows_draw_by_their_own_numbers(expected: list[np.ndarray]) -> None:
    np.testing.assert_array_equal(_decoded(_of_all()), expected)


def test_biases_of_one_width_are_the_same_program() -> None:
    few = [specjax.Sampling(logit_bias={1: 5, 2: each}) for each in (3.0, -3.0)]
    shapes = [[leaf.shape for leaf in jax.tree.leaves(each.per_row(3))] for each in few]
    assert shapes[0] == shapes[1]
    wide = specjax.LogitBias.of([{}, {3: 1}], width=300)
    assert wide.ids.shape == wide.values.shape == (2, 512)


def test_a_number_may_be_traced(expected: list[np.ndarray]) -> None:
    @jax.jit
    def decoded(temperature: jax.Array) -> jax.Array:
        sampling = specjax.Sampling(**FIRST | {"temperature": temperature})
        return specjax.decode(PARAMS, PROMPTS, sampling=sampling, key=KEY, **OPTIONS).tokens

    np.testing.assert_array_equal(decoded(0.4)[0], expected[0])


@pytest.mark.exhaustive
def test_prompts_of_a_queue_draw_by_their_own_numbers(expected: list[np.ndarray]) -> None:
    found = specjax.decode_many(PARAMS, PROMPTS, rows=2, sampling=_of_all(), key=KEY, **OPTIONS)
    for each, tokens in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each.tokens, tokens[: len(each.tokens)])


@pytest.mark.exhaustive
def test_texts_draw_by_their_own_numbers() -> None:
    tokenizer = WordTokenizer(CONFIG.vocab_size)
    texts = ["w5 w6 w7", "w8", "w9 w3"]
    prompts = [tokenizer.encode(text) for text in texts]
    drawn: dict[str, Any] = {"sampling": _of_all(), "key": KEY}
    found = specjax.generate(PARAMS, tokenizer, texts, **drawn, **OPTIONS)
    expected = specjax.decode_many(PARAMS, prompts, **drawn, **OPTIONS)
    for text, ids, prompt in zip(found, expected, prompts, strict=True):
        np.testing.assert_array_equal(text.tokens, ids.tokens[len(prompt) :])


def test_numbers_that_change_nothing_cost_nothing() -> None:
    idle = specjax.Sampling(
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0,
        logit_bias={},
    )  # fmt: skip
    assert len(jax.tree.leaves(idle.per_row(2))) == 1
    assert len(jax.tree.leaves(specjax.Sampling(top_p=np.ones(2)).per_row(2))) == 2


def test_one_number_per_row_or_one(wrong_types: None) -> None:
    sampling = specjax.Sampling(top_p=np.array([0.5, 0.6]))
    with pytest.raises(ValueError, match=r"top_p must be one number or one per row, shape \(3,\)"):
        _decoded(sampling)
    biased = specjax.Sampling(logit_bias=[{1: 2.0}, {}])
    with pytest.raises(
        ValueError, match=r"logit_bias must be one mapping or one per row, shape \(3"
    ):
        _decoded(biased)
