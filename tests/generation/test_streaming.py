"""Streams show what decoding returns, a round at a time."""

from __future__ import annotations

from collections import defaultdict

import jax
import numpy as np
import pytest

import specjax
from specjax import Round
from specjax.drafting.costs import Costs
from specjax.generation.batch_rows import run_round
from tests.support.covering import left_out, representatives
from tests.support.random_models import CONFIG, quantized_model, random_prompts

PROMPT = [72, 33, 44]
QSPEC = specjax.QSpec(4, "a4")


@pytest.fixture(scope="module")
def params() -> specjax.Params:
    return quantized_model()


@pytest.fixture(scope="module")
def decoded(params: specjax.Params) -> specjax.DecodeResult:
    return specjax.decode(params, PROMPT, max_new_tokens=21, drafter=QSPEC, logprobs=2)


def _joined(rounds: list[Round]) -> tuple[list[int], specjax.Logprobs]:
    """The tokens of all rounds, and their log-probabilities."""
    parts = [each.logprobs for each in rounds]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    return [token for each in rounds for token in each.tokens], joined


def test_stream_yields_what_decode_returns(params, decoded) -> None:
    rounds = list(specjax.stream(params, PROMPT, max_new_tokens=21, drafter=QSPEC, logprobs=2))
    tokens, logprobs = _joined(rounds)
    assert PROMPT + tokens == np.asarray(decoded.tokens[0]).tolist()
    jax.tree.map(
        np.testing.assert_array_equal, logprobs, jax.tree.map(lambda x: x[0], decoded.logprobs)
    )
    assert len(rounds) == int(decoded.stats.rounds[0])
    assert all(each.drafted == len(each.accepted) + len(each.rejected) == 4 for each in rounds[:-1])
    assert any(each.rejected for each in rounds), "a case that tests nothing"
    assert all(len(each.given) == 1 for each in rounds[:-1])
    *before, last = (each.completion for each in rounds)
    assert not any(before)
    assert last.tokens.tolist() == PROMPT + tokens and last.error is None


@pytest.mark.parametrize("sampling", [left_out(None), specjax.Sampling(temperature=0.9)], ids=repr)
def test_many_streams_are_decode_many(params, sampling) -> None:
    """Round by round, more prompts than rows, and one that is refused."""
    prompts = [*random_prompts((3, 70, 12, 1, 7), CONFIG.vocab_size), [CONFIG.vocab_size]]
    options = {
        "rows": 2, "max_new_tokens": 12, "drafter": QSPEC, "stop_tokens": (5,), "logprobs": 1,
        "sampling": sampling, "key": None if sampling is None else jax.random.key(3),
    }  # fmt: skip
    expected = specjax.decode_many(params, prompts, **options)
    rounds = defaultdict(list)
    at_a_time = 0
    for number, each in specjax.stream_many(params, prompts, **options):
        assert not rounds[number] or rounds[number][-1].completion is None, "after its last round"
        rounds[number].append(each)
        at_a_time = max(at_a_time, sum(all_[-1].completion is None for all_ in rounds.values()))
    assert at_a_time == 2
    assert sorted(rounds) == list(range(len(prompts)))
    for number, completion in enumerate(expected):
        last = rounds[number][-1].completion
        jax.tree.map(
            np.testing.assert_array_equal, (last.tokens, last.stats, last.logprobs),
            (completion.tokens, completion.stats, completion.logprobs),
        )  # fmt: skip
        assert last.error == completion.error
        if last.error is None:
            tokens, logprobs = _joined(rounds[number])
            assert tokens == completion.tokens[len(prompts[number]) :].tolist()
            jax.tree.map(np.testing.assert_array_equal, logprobs, completion.logprobs)
            assert len(rounds[number]) == int(completion.stats.rounds)
    assert rounds[5] == [Round([], [], [], rounds[5][0].completion)]
    assert "outside the vocabulary" in rounds[5][0].completion.error


def test_rounds_count_the_nodes_of_a_tree_that_were_drafted(params) -> None:
    """Most nodes are on no path that the target follows, and no round lists them."""
    drafter = specjax.Spectra(ngram=3, window=2, guesses=2)
    rounds = list(specjax.stream(params, PROMPT * 3, max_new_tokens=21, drafter=drafter))
    stats = rounds[-1].completion.stats
    assert sum(each.drafted for each in rounds) == int(stats.drafted)
    assert any(each.drafted > len(each.accepted) + len(each.rejected) for each in rounds)


def test_bad_input_is_refused_at_the_call(params) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        specjax.stream(params, [])
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
    with pytest.raises(ValueError, match="prompts must hold at least one prompt, got none"):
        specjax.stream_many(params, [])
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        specjax.stream_many(params, [PROMPT], rows=0)
    with pytest.raises(ValueError, match="key goes with sampling"):
        specjax.stream_many(params, [PROMPT], key=jax.random.key(0))


@pytest.mark.exhaustive
def test_prompts_of_like_length_share_their_programs(params, nothing_kept) -> None:
    def tokens(prompt: list[int]) -> list[int]:
        rounds = specjax.stream(params, prompt, max_new_tokens=11)
        return prompt + [token for each in rounds for token in each.tokens]

    run_round.clear_cache()  # other tests may have left the longer prompt's program
    tokens((PROMPT * 11)[:25])
    compiled = run_round._cache_size()
    longer = (PROMPT * 11)[:32]
    streamed = tokens(longer)
    assert run_round._cache_size() == compiled
    expected = specjax.decode(params, longer[:31], max_new_tokens=11).tokens[0]
    assert tokens(longer[:31]) == np.asarray(expected).tolist()
    assert len(streamed) == 32 + 11 and len(tokens((PROMPT * 11)[:33])) == 33 + 11
    assert run_round._cache_size() > compiled, "a case that tests nothing"


def test_the_callers_arrays_are_not_used_up(params) -> None:
    """Rounds donate their state, and one prompt's arrays might be its own."""
    keys, temperature = jax.random.split(jax.random.key(3), 1), jax.numpy.array([0.7])
    options = {"sampling": specjax.Sampling(temperature=temperature), "key": keys}
    list(specjax.stream(params, PROMPT, max_new_tokens=2, **options))
    specjax.decode_many(params, [PROMPT], rows=1, max_new_tokens=2, **options)
    assert not keys.is_deleted() and not temperature.is_deleted()


@pytest.mark.parametrize("length", representatives([481, 490, 500], 490))
def test_padding_leaves_room_for_the_output(params, length) -> None:
    prompt = (PROMPT * 200)[:length]
    room = CONFIG.max_position_embeddings - length
    rounds = list(specjax.stream(params, prompt, max_new_tokens=room))
    assert sum(len(each.tokens) for each in rounds) == room
    with pytest.raises(ValueError, match=f"prompt of {length} tokens and max_new_tokens"):
        specjax.stream(params, prompt, max_new_tokens=room + 1)


@pytest.mark.exhaustive
def test_a_round_names_the_part_of_the_drafter_that_proposed(params) -> None:
    passes, draft = np.ones(4, np.float32), np.float32(0.01)
    costs = Costs(passes, draft)
    memory = specjax.SuffixMemory.create(CONFIG.vocab_size)
    options = {"max_new_tokens": 21, "stop_tokens": ()}
    for drafter, expected in (
        (specjax.Auto(costs, specjax.LayerSkip((0,), 2)), "model"),
        (specjax.Auto(costs, memory=memory.add([_whole(params, PROMPT, options)])), "memory"),
        (specjax.Auto(costs), "text"),
    ):
        prompt = PROMPT if expected != "text" else _whole(params, PROMPT, options)
        rounds = list(specjax.stream(params, prompt, drafter=drafter, **options))
        assert expected in {each.source for each in rounds}
        for each in rounds:
            assert (each.source is not None) == bool(each.accepted + each.rejected)


def _whole(params: specjax.Params, prompt: list[int], options: dict[str, object]) -> list[int]:
    plain = specjax.decode(params, prompt, drafter=specjax.Autoregressive(), **options)
    return np.asarray(plain.tokens[0]).tolist()
