"""Rounds of the rows that are taken, which come first and move together: outputs do not change."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafting.calibration import settled_for_each
from specjax.drafting.costs import Costs
from specjax.generation.batch import Batch, empty_batch
from specjax.generation.batch_rows import Waiting
from specjax.generation.kinds import Kind, Scope
from specjax.generation.request import Request
from specjax.model.kv_cache import KVCache
from specjax.speculation.first_rows import first_rows, move_row, put_first_rows
from tests.support.covering import left_out
from tests.support.random_models import CONFIG, quantized_model, random_prompts

PARAMS = quantized_model()
LENGTHS, NEW = (70, 5, 3), (4, 19, 30)
PROMPTS = random_prompts(LENGTHS, CONFIG.vocab_size)
EAGER = Costs(np.ones(4, np.float32), np.float32(0.01))  # by which Auto drafts what it can
DRAFTERS = [
    specjax.Autoregressive(),
    specjax.QSpec(3, "a4"),
    specjax.Auto(EAGER, specjax.QSpec(3, "a4")),
    left_out(specjax.QSpec(2, overwrite=False)),
    left_out(specjax.DraftModel(PARAMS, 3, schedule=specjax.Heuristic())),
    left_out(specjax.MultiLevel(specjax.DraftModel(PARAMS, 4), specjax.NGram(2))),
    left_out(specjax.Spectra(window=2, guesses=2, capacity=64)),
    left_out(specjax.TokenRecycling(nodes=6, successors=3)),
    left_out(specjax.DraftTree(specjax.QSpec(2, "a4"), width=2, nodes=6)),
]


@cache
def tiny() -> specjax.Params:
    """A model whose layers run in one call on CPUs."""
    return specjax.load("tiny")


def run_to_the_end(batch: Batch) -> tuple[dict[int, np.ndarray], list[Scope]]:
    """Returns every prompt's tokens, and the scopes of all rounds."""
    tokens, scopes = {}, []
    while batch.busy:
        batch.fill()
        if batch.running:
            batch.steps()
            scopes.append(batch._scope())
            for row in batch.finished():
                number = batch.running[row].number
                tokens[number] = batch.take(row).tokens
    return tokens, scopes


def batch_of(drafter: specjax.Drafter, params: specjax.Params = PARAMS, **options: Any) -> Batch:
    request = Request.make(params, drafter=drafter, stop_tokens=(), **options)
    batch = empty_batch(params, request, 4, 128)
    for number, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True)):
        tokens = np.array(prompt, np.int32)
        batch.add(Waiting(number, tokens, len(prompt) + new, None, None, kind=Kind.GREEDY))
    return batch


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: type(drafter).__name__)
def test_outputs_are_those_of_decoding_alone(drafter) -> None:
    check_outputs(PARAMS, drafter)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("overwrite", [True, False])
def test_quantized_caches_keep_their_rows(overwrite: bool, bits: int) -> None:
    check_outputs(PARAMS, specjax.QSpec(2, "a4", overwrite=overwrite), cache_bits=bits)


@pytest.mark.parametrize(
    "drafter", [specjax.QSpec(3, "a4"), left_out(specjax.Autoregressive())], ids=repr
)
def test_layers_in_one_call_run_on_fewer_rows_than_their_cache_has(drafter) -> None:
    check_outputs(tiny(), drafter)


def check_outputs(params: specjax.Params, drafter: specjax.Drafter, **options: Any) -> None:
    tokens, scopes = run_to_the_end(batch_of(drafter, params, **options))
    for number, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True)):
        alone = specjax.decode(
            params, [prompt], max_new_tokens=new, drafter=specjax.Autoregressive(),
            stop_tokens=(), **options,
        )  # fmt: skip
        np.testing.assert_array_equal(tokens[number], alone.tokens[0])
    rows = [scope.rows for scope in scopes]
    assert set(rows) == {4, 2, 1}, "three rows, two, of which one has moved, and one"
    assert rows == sorted(rows, reverse=True)


def test_free_rows_keep_what_they_hold() -> None:
    batch = batch_of(specjax.QSpec(3, "a4"))
    for _ in range(8):
        batch.fill()
    state, before = batch.state, jax.tree.map(np.asarray, batch.state)
    part = first_rows(state, 2)
    assert part.cache.keys.shape == state.cache.keys.shape and part.tokens.shape[0] == 2
    after = jax.tree.map(np.asarray, put_first_rows(state, part))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("bits", [16, 8])
def test_a_row_moves_with_its_entries(bits: int) -> None:
    batch = batch_of(specjax.QSpec(2, overwrite=False), cache_bits=bits)
    for _ in range(8):
        batch.fill()
    before = jax.tree.map(np.asarray, batch.state)
    after = jax.tree.map(np.asarray, move_row(batch.state, np.int32(0), np.int32(3)))
    length = int(before.cache.lengths[0])
    assert length == LENGTHS[0] - 1

    def check(was: Any, now: Any) -> None:
        if not isinstance(was, KVCache):
            np.testing.assert_array_equal(now[3], was[0])
            return
        assert now.lengths[3] == was.lengths[0]
        entries = (jax.tree.leaves((cache.keys, cache.values)) for cache in (was, now))
        for old, new in zip(*entries, strict=True):
            np.testing.assert_array_equal(new[3, :, :length], old[0, :, :length])
            np.testing.assert_array_equal(new[:3], old[:3])

    assert after.finished.tolist() == [True, False, False, False]
    jax.tree.map(
        check,
        *(dataclasses.replace(state, finished=None) for state in (before, after)),
        is_leaf=lambda node: isinstance(node, KVCache),
    )


def test_costs_between_two_that_were_measured_follow_from_them() -> None:
    few = Costs(np.array([1, 1.2, 1.4, 2.0], np.float32), np.float32(0.8))
    many = Costs(np.array([1, 1.5, 3.0, 6.0], np.float32), np.float32(0.6))
    np.testing.assert_allclose(few.for_more(8, many, 1).passes, few.passes)
    np.testing.assert_allclose(few.for_more(8, many, 8).passes, many.passes)
    np.testing.assert_allclose(
        few.for_more(8, many, 2).passes, np.array([1.2, 1.4, 2.0, 3.0]) / 1.2, rtol=1e-6
    )
    assert 0.6 < few.for_more(8, many, 4).draft < 0.8
    given = specjax.Auto(few)
    assert settled_for_each(given, PARAMS, [1, 2], 16, "a16", 128) == {1: given, 2: given}
    assert jnp.all(few.for_more(8, many, 4).passes >= 1)
