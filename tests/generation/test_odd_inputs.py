"""Prompts and numbers of any type: each is taken as it is meant, or refused in one sentence."""

from __future__ import annotations

import fractions
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.generation.batch import _check_prompts
from specjax.generation.request import Request
from tests.support.random_models import CONFIG, random_model

pytestmark = pytest.mark.usefixtures("wrong_types")
PARAMS = random_model()
REQUEST = Request.make(PARAMS, drafter=specjax.Autoregressive(), max_new_tokens=2)
GOOD = [
    [1, 2],
    (1, 2),
    np.array([1, 2]),
    jnp.array([1, 2]),
    [np.int64(1), np.uint8(2)],
    range(1, 3),
]
BAD = [
    [[1, 2], [4, 5]], [[1, 2]], np.array([[1, 2]]), np.array(5), None, [1, [2]], [[1], [2, 3]], [],
    5, "ab", b"ab", [1.0, 2.0], np.array([1.0]), ["1"], [True], [2**70], [-1], [CONFIG.vocab_size],
    {1: 2}, {1, 2}, iter([1, 2]), object(), [1] * 1000,
]  # fmt: skip


def test_every_prompt_is_decoded_or_has_its_error() -> None:
    given = [prompt for pair in zip(BAD, [*GOOD] * 4, strict=False) for prompt in pair]
    completions = specjax.decode_many(
        PARAMS, (prompt for prompt in given), rows=2, max_new_tokens=2,
        drafter=specjax.Autoregressive(), stop_tokens=(),
    )  # fmt: skip
    expected = completions[1].tokens
    for bad, good in zip(completions[::2], completions[1::2], strict=True):
        assert good.error is None
        np.testing.assert_array_equal(good.tokens, expected)
        assert bad.error.startswith(("prompt", "a token of prompt"))
        assert bad.tokens.shape == (0,)
        assert bad.tokens.dtype == good.tokens.dtype == np.int32
        assert "\n" not in bad.error
        assert len(bad.error) < 400


def test_lists_of_traced_tokens_are_refused() -> None:
    def decode(token: jax.Array) -> jax.Array:
        return specjax.decode(PARAMS, [[1, token]], max_new_tokens=2).tokens

    with pytest.raises(ValueError, match=r"prompt row 0 must be part of an array int32\[B, T\]"):
        jax.jit(decode)(jnp.int32(2))


nests = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(nests, max_size=4))
def test_any_nest_is_accepted_or_refused(prompts: list) -> None:
    accepted, refused = _check_prompts(PARAMS, REQUEST, prompts)
    assert {*accepted} | {*refused} == {*range(len(prompts))}
    for index, tokens in accepted.items():
        assert tokens.tolist() == list(prompts[index])


@pytest.mark.parametrize("prompts", [None, 5, "ab", b"ab", [], iter(())])
def test_prompts_are_some(prompts: object) -> None:
    with pytest.raises(ValueError, match="prompts must"):
        specjax.decode_many(PARAMS, prompts)


SEVENTENTHS = [np.float32(0.7), np.float64(0.7), np.array(0.7), jnp.array(0.7)]


@pytest.mark.parametrize("number", [*SEVENTENTHS, fractions.Fraction(7, 10)], ids=repr)
def test_any_real_number_is_a_number(number: object) -> None:
    given = specjax.Sampling(temperature=number, top_p=number, min_p=number, top_k=np.int64(3))
    same = float(number)
    plain = specjax.Sampling(temperature=same, top_p=same, min_p=same, top_k=3)
    assert given == plain
    assert hash(given) == hash(plain)
    assert json.loads(json.dumps([given.temperature, given.top_k])) == [same, 3]


def test_whole_numbers_are_numbers() -> None:
    one = np.int64(1)
    assert specjax.Sampling(temperature=one, top_p=one, min_p=np.array(0)) == specjax.Sampling(
        temperature=1.0, top_p=1.0, min_p=0.0
    )


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("value", ["0.5", True, np.True_, 1j, [0.5], 10**400])
def test_what_is_no_number_is_called_so(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a number, got "):
        specjax.Sampling(**{name: value})


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("temperature", "[1e-6, 1e6]"), ("top_p", "(0, 1]"), ("min_p", "[0, 1]"),
        ("repetition_penalty", "[1e-6, 1e6]"), ("presence_penalty", "[-2, 2]"),
        ("frequency_penalty", "[-2, 2]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [np.float32(-3), 2e6, float("nan"), np.float64("inf")])
def test_ranges_are_named(name: str, accepted: str, value: float) -> None:
    with pytest.raises(ValueError) as error:
        specjax.Sampling(**{name: value})
    assert f"{name} must be in {accepted}" in str(error.value)
    assert f"got {float(value)}" in str(error.value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"temperature": np.array([0.7, 0])}, "temperature must be in [1e-6, 1e6], got [0.7 0. ]"),
        ({"top_p": jnp.array([0.5, 1.5])}, "top_p must be in (0, 1] or None, got [0.5 1.5]"),
        ({"top_k": np.array([3, 0])}, "top_k must be at least 1 or None, got [3 0]"),
        ({"top_k": np.array([3.0])}, "top_k must be an array of integers, got float64"),
        ({"min_p": np.array([True])}, "min_p must be an array of numbers, got bool"),
        ({"logit_bias": {3: 101}}, "a bias of logit_bias must be in [-100, 100], got 101.0"),
        ({"logit_bias": {"a": 1}}, "a token of logit_bias must be an integer, got 'a'"),
        ({"logit_bias": {-1: 1}}, "a token of logit_bias must be a token id, got -1"),
        ({"logit_bias": 3}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": specjax.LogitBias([5], [1.0])}, "a LogitBias must have arrays as ids and"),
        (
            {"logit_bias": specjax.LogitBias(np.array([5]), np.array([np.nan]))},
            "values of a LogitBias must be in [-100, 100]",
        ),
        (
            {"logit_bias": specjax.LogitBias(np.array([5.0]), np.array([1.0]))},
            "ids of a LogitBias must be integers, got float64",
        ),
        ({"min_p": np.ones((1, 2))}, "min_p must be a number or an array [B], got shape (1, 2)"),
    ],
    ids=str,
)
def test_arrays_are_checked(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        specjax.Sampling(**field)
    assert str(error.value).startswith(message)
