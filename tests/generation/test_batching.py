"""Continuous batching: every prompt's output is that of decoding it alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.evaluation.scoring import score_tokens
from specjax.generation import batch_rows
from specjax.generation.batching import Progress, complete, decode_many
from tests.support.random_models import CONFIG, quantized_model, random_prompts

LENGTHS = (3, 90, 1, 12, 7, 65, 66, 2, 30)
PROMPTS = random_prompts(LENGTHS, CONFIG.vocab_size)
NEW = 20


@pytest.fixture(scope="module")
def params() -> specjax.Params:
    return quantized_model()


@pytest.fixture(scope="module")
def alone(params) -> list[np.ndarray]:
    """Every prompt decoded by itself, plainly, until the stop token 5."""
    results = specjax.decode(
        params, PROMPTS, max_new_tokens=NEW, drafter=specjax.Autoregressive(), stop_tokens=(5,)
    )
    rows = zip(np.asarray(results.tokens), results.lengths, strict=True)
    return [row[:length] for row, length in rows]


@pytest.mark.parametrize(
    "drafter",
    [specjax.Autoregressive(), specjax.QSpec(4, "a4"), specjax.QSpec(2, overwrite=False)],
    ids=repr,
)
def test_outputs_are_those_of_decoding_alone(params, alone, drafter) -> None:
    results = decode_many(
        params, PROMPTS, rows=3, max_new_tokens=NEW, drafter=drafter, stop_tokens=(5,)
    )
    assert len({len(tokens) for tokens in alone}) > 3, "a case in which nothing ends early"
    for result, expected in zip(results, alone, strict=True):
        np.testing.assert_array_equal(result.tokens, expected)
        assert result.error is None and int(result.stats.rounds) > 0


@pytest.mark.exhaustive
def test_a_draft_model_and_levels_are_admitted_row_by_row(params, alone) -> None:
    drafter = specjax.MultiLevel(
        specjax.DraftModel(params, 4, schedule=specjax.Heuristic()), specjax.QSpec(2, "a4")
    )
    results = decode_many(
        params, PROMPTS[:5], rows=2, max_new_tokens=NEW, drafter=drafter, stop_tokens=(5,)
    )
    for result, expected in zip(results, alone, strict=False):
        np.testing.assert_array_equal(result.tokens, expected)
    assert int(results[0].levels[0].rounds) > 0


@pytest.mark.exhaustive
def test_samples_are_those_of_the_prompts_own_key(params) -> None:
    keys = jax.random.split(jax.random.key(0), len(PROMPTS))
    options = {
        "max_new_tokens": 8, "sampling": specjax.Sampling(temperature=0.9),
        "drafter": specjax.QSpec(2, "a4"),
    }  # fmt: skip
    many = decode_many(params, PROMPTS, rows=4, key=keys, **options)
    for index in (0, 5, 8):
        solo = specjax.decode(params, PROMPTS[index], key=keys[index : index + 1], **options)
        np.testing.assert_array_equal(many[index].tokens, solo.tokens[0, : solo.lengths[0]])


def test_rows_are_refilled_at_once(params) -> None:
    """Until the queue is empty, nearly every row of every round is of use."""
    seen: list[Progress] = []
    short = random_prompts((5,) * 24, CONFIG.vocab_size, seed=1)
    options = {"rows": 4, "max_new_tokens": NEW, "stop_tokens": ()}
    order = [index for index, _ in complete(params, short, progress=seen.append, **options)]
    assert sorted(order) == list(range(24))
    busy = [each for each in seen if each.total - each.done >= 4]
    assert busy[-1].useful_rounds / busy[-1].row_rounds > 0.95
    assert seen[-1].done == seen[-1].total == 24
    assert seen[-1].generated == 24 * NEW


@pytest.mark.parametrize(
    "drafter", [specjax.Autoregressive(), specjax.QSpec(4, "a4")], ids=["plain", "qspec"]
)
def test_outputs_end_with_the_first_token_that_stops_them(params, alone, drafter) -> None:
    """Every prompt has its own stop; tokens drafted behind it are not seen."""
    lengths = [len(prompt) for prompt in PROMPTS]
    outputs = [row[length:] for row, length in zip(alone, lengths, strict=True)]
    ends = [output[min(number, len(output) - 1)] for number, output in enumerate(outputs)]
    results = decode_many(
        params, PROMPTS, rows=3, max_new_tokens=NEW, drafter=drafter, stop_tokens=(5,),
        stop_when=lambda number, output: ends[number] in output,
    )  # fmt: skip
    for result, length, output, end in zip(results, lengths, outputs, ends, strict=True):
        kept = output[: output.tolist().index(end) + 1]
        np.testing.assert_array_equal(result.tokens[length:], kept)
        assert int(result.stats.generated) == len(kept)
    rounds = [int(result.stats.rounds) for result in results]
    assert max(rounds) < NEW or isinstance(drafter, specjax.Autoregressive)
    assert rounds[0] == 1, "its first token ends it"


def test_more_prompts_compile_nothing_new(params) -> None:
    options = {"rows": 3, "max_new_tokens": NEW}
    decode_many(params, PROMPTS, **options)
    functions = (batch_rows._chunk, batch_rows._begin, batch_rows._insert, batch_rows.run_rounds)
    compiled = [function._cache_size() for function in functions]
    decode_many(params, random_prompts((4, 80, 33, 65, 90), CONFIG.vocab_size, seed=9), **options)
    assert [function._cache_size() for function in functions] == compiled


def test_a_prompt_that_cannot_be_decoded_stops_no_other(params, alone) -> None:
    prompts = [PROMPTS[0], [1] * 600, PROMPTS[3], [], [CONFIG.vocab_size]]
    results = decode_many(params, prompts, rows=2, max_new_tokens=NEW, stop_tokens=(5,))
    np.testing.assert_array_equal(results[0].tokens, alone[0])
    np.testing.assert_array_equal(results[2].tokens, alone[3])
    assert "512 positions" in results[1].error
    assert "empty" in results[3].error
    assert "outside the vocabulary" in results[4].error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts must hold at least one prompt, got none"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"cache_bits": 5}, "cache_bits"),
        ({"drafter": "qspec"}, "drafter must be a drafter"),
    ],
)
def test_bad_input_gets_one_clear_sentence(params, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        decode_many(params, **{"prompts": PROMPTS, **change})


def test_low_precision_is_the_greedy_choice_of_the_low_pass(params) -> None:
    """Token by token, prompts included; it is not what 16 bits choose."""
    plain = specjax.Autoregressive()
    low, precise = (
        decode_many(
            params, PROMPTS[:3], rows=2, max_new_tokens=10, drafter=plain, activation=activation,
            stop_tokens=(),
        )
        for activation in ("a4", "a16")
    )  # fmt: skip
    assert low[0].tokens.tolist() != precise[0].tokens.tolist()
    for prompt, result in zip(PROMPTS, low, strict=False):
        tokens = list(prompt)
        for _ in range(10):
            padded = jnp.array([tokens + [0] * (100 - len(tokens))])
            tokens.append(int(score_tokens(params, padded, activation="a4")[1][0, len(tokens) - 1]))
        assert result.tokens.tolist() == tokens
