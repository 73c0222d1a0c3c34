"""Prompts that begin alike are read once, and no bit of the cache or the output depends on it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import specjax
from specjax.generation.batch import empty_batch
from specjax.generation.batch_rows import (
    Job,
    PromptReading,
    Waiting,
    open_prompt,
    read_chunk,
)
from specjax.generation.batching import decode_many
from specjax.generation.prefix_cache import PrefixCache, begin_alike
from specjax.generation.request import Request
from specjax.model.transformer import CHUNK
from tests.support.covering import left_out, representatives
from tests.support.random_models import CONFIG, quantized_model, random_prompts

CONTEXT, NEW = 400, 12
LONG, OTHER = (np.array(each, np.int32) for each in random_prompts((300, 300), CONFIG.vocab_size))


@pytest.fixture(scope="module")
def params() -> specjax.Params:
    return quantized_model()


def job_of(params: specjax.Params, bits: int) -> Job:
    request = Request.make(params, drafter=specjax.Autoregressive(), cache_bits=bits)
    return empty_batch(params, request, 1, CONTEXT).job


def read(job: Job, tokens: np.ndarray, prefixes: PrefixCache | None) -> PromptReading:
    """Reads a prompt to its end."""
    reading = open_prompt(job, Waiting(0, tokens, CONTEXT, None, None))
    if prefixes is not None:
        reading = prefixes.resume(reading)
    while reading.unread:
        before = reading.done
        reading = read_chunk(job, reading)
        if prefixes is not None:
            prefixes.keep(reading, before)
    return reading


def entries(reading: PromptReading) -> list[np.ndarray]:
    """The bits of all entries that were read."""
    parts = jax.tree.leaves((reading.cache.keys, reading.cache.values))
    return [np.asarray(part)[:, :, : reading.done] for part in parts]


@pytest.mark.recompiled
@pytest.mark.parametrize("bits", representatives([16, 8, 4], 16, 4))
def test_entries_have_the_same_bits(params, bits) -> None:
    job, prefixes = job_of(params, bits), PrefixCache()
    read(job, np.concatenate((LONG[:200], OTHER[:50])), prefixes)
    found = read(job, LONG, prefixes)
    assert prefixes.found == 3 * CHUNK
    for mine, alone in zip(entries(found), entries(read(job, LONG, None)), strict=True):
        np.testing.assert_array_equal(mine, alone)


@pytest.mark.recompiled
@pytest.mark.parametrize(
    "drafter", [specjax.Auto(), left_out(specjax.Spectra())], ids=["chain", "tree"]
)
def test_entries_of_an_output_have_the_bits_of_reading_it(params, drafter) -> None:
    """The next turn of a conversation begins with the last one's prompt and output."""
    request = Request.make(params, drafter=drafter, stop_tokens=())
    prefixes = PrefixCache(outputs=True)
    batch = empty_batch(params, request, 2, CONTEXT, prefixes=prefixes)
    batch.add(Waiting(0, LONG[:100], 280, None, None))
    while batch.busy:
        batch.fill()
        if batch.running:
            batch.run(1000)
            (output,) = [batch.take(row) for row in batch.finished()]
    assert len(output.tokens) == 280
    job, turn = job_of(params, 16), np.concatenate((output.tokens, OTHER[:30]))
    found = read(job, turn, prefixes)
    assert prefixes.found == 4 * CHUNK
    for mine, alone in zip(entries(found), entries(read(job, turn, None)), strict=True):
        np.testing.assert_array_equal(mine, alone)


def test_the_least_recently_used_go_first(params) -> None:
    job, prefixes = job_of(params, 16), PrefixCache()
    read(job, LONG, prefixes)
    one = prefixes.nbytes
    small = PrefixCache(one + one // 2)  # room for six chunks of the eight
    read(job, LONG, small)
    read(job, OTHER, small)
    assert small.nbytes <= one + one // 2
    before = small.found
    read(job, OTHER, small)
    assert small.found - before == 4 * CHUNK
    before = small.found
    read(job, LONG, small)
    assert small.found - before == 2 * CHUNK, "the first chunks of a text outlast its last ones"


def test_a_whole_prompt_is_never_found(params) -> None:
    """Its last token is left to the first round, also where it ends a chunk."""
    job, prefixes = job_of(params, 16), PrefixCache()
    for length in (1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1):
        for _ in range(2):
            assert read(job, LONG[:length], prefixes).done == length - 1


@pytest.mark.recompiled
def test_outputs_are_those_of_each_prompt_alone(params) -> None:
    prompts = [[*LONG[:cut].tolist(), 7, cut % 50] for cut in (40, 130, 130, 200, 64, 65)]
    assert begin_alike([np.array(each, np.int32) for each in prompts])
    assert not begin_alike([LONG, OTHER, LONG[:CHUNK]])
    found = decode_many(params, prompts, rows=2, max_new_tokens=NEW)
    for prompt, each in zip(prompts, found, strict=True):
        alone = specjax.decode(params, prompt, max_new_tokens=NEW)
        np.testing.assert_array_equal(each.tokens, alone.tokens[0, : alone.lengths[0]])
