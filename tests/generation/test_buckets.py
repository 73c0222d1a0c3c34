"""Like lengths share a compiled program, and the output does not show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.generation.batch_rows import run_round, run_rounds
from specjax.generation.decoding import _decode
from specjax.generation.rows import bucket
from tests.support.covering import left_out
from tests.support.random_models import CONFIG, quantized_model, random_prompts

PARAMS = quantized_model()
PLAIN: dict[str, Any] = {"drafter": specjax.Autoregressive()}
BOTH = pytest.mark.parametrize(
    "drafter", [specjax.Autoregressive(), left_out(None)], ids=["plain", "Auto"]
)


def _prompt(length: int) -> list[int]:
    return random_prompts((length,), CONFIG.vocab_size)[0]


def test_buckets_are_at_most_half_larger() -> None:
    sizes = [bucket(length) for length in range(1, 2000)]
    assert sorted(set(sizes))[:8] == [16, 24, 32, 48, 64, 96, 128, 192]
    assert all(length <= size for length, size in enumerate(sizes, 1))
    assert all(size <= 1.5 * length for length, size in enumerate(sizes, 1) if length >= 16)


@pytest.fixture
def compiled(nothing_kept: None) -> Callable[[], int]:
    """How many programs of the loop the test has needed: those of other tests are forgotten."""
    _decode.clear_cache()
    return _decode._cache_size


@BOTH
def test_fifty_lengths_are_five_programs(
    drafter: specjax.Drafter | None, compiled: Callable[[], int]
) -> None:
    for length in range(1, 51):
        specjax.decode(PARAMS, _prompt(length), max_new_tokens=2, drafter=drafter)
    assert compiled() == len({16, 24, 32, 48, 64})


@pytest.mark.parametrize("door", [specjax.decode, specjax.decode_many])
def test_another_length_compiles_nothing(
    door: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the loop nor the smallest program: each would take longer than some tokens."""

    def compiled_by(lengths: tuple[int, ...], new: int) -> list[str]:
        caplog.clear()
        with jax.log_compiles():
            prompts = random_prompts(lengths, CONFIG.vocab_size)
            door(PARAMS, prompts, max_new_tokens=new, logprobs=1, **PLAIN)
        return [line for line in caplog.messages if line.startswith("Compiling")]

    assert compiled_by((17, 20), 2)
    assert compiled_by((23, 18), 5) == []


@BOTH
def test_outputs_and_temperatures_are_one_program(
    drafter: specjax.Drafter | None, compiled: Callable[[], int]
) -> None:
    options: dict[str, Any] = {"drafter": drafter, "stop_tokens": (7,)}
    for new in (1, 3, 8, 13, 16):
        specjax.decode(PARAMS, _prompt(3), max_new_tokens=new, **options)
    assert compiled() == 1
    for temperature in np.linspace(0.1, 2, 10).tolist():
        sampling = specjax.Sampling(temperature=temperature)
        key = jax.random.key(0)
        specjax.decode(PARAMS, _prompt(3), max_new_tokens=2, sampling=sampling, key=key, **options)
    assert compiled() == 2


@pytest.mark.exhaustive
def test_queues_of_like_prompts_are_one_program() -> None:
    run_rounds.clear_cache()
    for lengths, new in (((3, 9), 4), ((16, 1), 9), ((7, 12), 16)):
        prompts = random_prompts(lengths, CONFIG.vocab_size)
        specjax.decode_many(PARAMS, prompts, rows=2, max_new_tokens=new, **PLAIN)
    assert run_rounds._cache_size() == 1


def test_a_round_is_compiled_once_for_a_model_that_is_bound_to_its_device(nothing_kept) -> None:
    """JAX binds what it reads from a checkpoint, and the results of programs over it."""
    norm = jax.device_put(PARAMS.final_norm, jax.devices()[0])
    params = dataclasses.replace(PARAMS, final_norm=norm)
    for program, run in (
        (run_round, lambda: list(specjax.stream(params, [3, 4], max_new_tokens=3, **PLAIN))),
        (run_rounds, lambda: specjax.decode_many(params, [[3], [4]], rows=1, **PLAIN)),
    ):
        program.clear_cache()
        run()
        assert program._cache_size() == 1


@pytest.mark.parametrize("drafter", [specjax.QSpec(3), left_out(specjax.NGram(2))], ids=repr)
def test_the_output_is_that_of_exact_buffers(drafter: specjax.Drafter) -> None:
    prompts = random_prompts((5, 18), CONFIG.vocab_size)
    options: dict[str, Any] = {"max_new_tokens": 5, "logprobs": 2, "drafter": drafter}
    wide = specjax.decode(PARAMS, prompts, **options)
    exact = specjax.decode(PARAMS, prompts, cache_capacity=18 + 5 + 2, **options)
    traced = jax.jit(
        lambda tokens, lengths: specjax.decode(PARAMS, tokens, prompt_lengths=lengths, **options)
    )(np.array([[*prompts[0], *[0] * 13], prompts[1]]), np.array([5, 18]))
    for found in (wide, traced):
        assert found.tokens.shape == (2, 23)
        assert found.logprobs.top_tokens.shape == (2, 5, 2)
        jax.tree.map(
            np.testing.assert_array_equal,
            (found.tokens, found.lengths, found.logprobs),
            (exact.tokens, exact.lengths, exact.logprobs),
        )


def test_a_bucket_without_room_is_not_used() -> None:
    room = CONFIG.max_position_embeddings
    result = specjax.decode(PARAMS, _prompt(room - 3), max_new_tokens=3, **PLAIN)
    assert result.tokens.shape == (1, room)
    (queued,) = specjax.decode_many(PARAMS, [_prompt(room - 3)], max_new_tokens=3, **PLAIN)
    np.testing.assert_array_equal(queued.tokens, result.tokens[0])
