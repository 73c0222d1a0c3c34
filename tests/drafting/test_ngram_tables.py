"""Dictionaries on the device are the dictionaries of a plain Python program."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.drafting.ngram_tables import NGramTable, index_text, last_tokens
from tests.support.spectra_model import NGrams

VOCAB, ROWS, BATCH, MOST = 5, 2, 4, 9


@partial(jax.jit, static_argnames="parts")
def _insert_and_look_up(table, ngrams, valid, tokens, context, parts):
    table = table.insert(ngrams, valid)
    places = (False, True) if ngrams.shape[2] > 2 else (False,)
    return (
        table,
        [table.continuations(tokens, MOST, inside=inside) for inside in places],
        table.next_token(context, parts=parts),
        table.keys(VOCAB, parts=parts),
    )


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize(("n", "capacity"), [(2, 9), (3, 12), (5, 40)])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), rounds=st.integers(1, 12))
def test_a_table_is_a_dictionary(n: int, capacity: int, parts: bool, seed: int, rounds: int):
    """Also where n-grams come again, within a batch and later, and where the oldest must go."""
    rng = np.random.default_rng(seed)
    table = NGramTable.create(ROWS, n, capacity)
    models = [NGrams(n, capacity, parts) for _ in range(ROWS)]
    for _ in range(rounds):
        ngrams = rng.integers(0, rng.integers(1, VOCAB, endpoint=True), (ROWS, BATCH, n))
        ngrams[rng.random(ROWS) < 0.2, 0, : n - 1 - rng.integers(n - 1)] = -1  # a text's beginning
        valid = rng.random((ROWS, BATCH)) < 0.8
        tokens = rng.integers(0, VOCAB, ROWS)
        context = rng.integers(0, VOCAB, (ROWS, n - 1))
        context[rng.random(ROWS) < 0.2, : rng.integers(n - 1, endpoint=True)] = -1
        table, continuations, (following, known), keys = _insert_and_look_up(
            table, jnp.asarray(ngrams), valid, tokens, context, parts
        )
        for row, model in enumerate(models):
            model.insert([tuple(x) for x in ngrams[row][valid[row]].tolist()])
            for inside, (found, lengths) in enumerate(continuations):
                expected = model.forward(bool(inside))[int(tokens[row])][:MOST]
                candidates = zip(found[row].tolist(), lengths[row].tolist(), strict=True)
                ours = [tuple(x[:length]) for x, length in candidates]
                assert [x for x in ours if x] == expected
                assert not any(ours[len(expected) :])
            token = model.next_token([x for x in context[row].tolist() if x >= 0])
            assert (int(following[row]) if known[row] else None) == token
            begun = set(model.forward(inside=False))
            if parts:
                begun |= set(model.forward(inside=True))
            assert set(np.flatnonzero(keys[row])) == begun


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_text_is_indexed_from_where_it_was_left(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, width = 4, 60
    tokens = rng.integers(0, VOCAB, (ROWS, width))
    table, models = NGramTable.create(ROWS, n, 64), [NGrams(n, 64) for _ in range(ROWS)]
    first = np.zeros(ROWS, int)
    for _ in range(3):
        lengths = rng.integers(first, width, endpoint=True)
        table = _index_text(table, jnp.asarray(tokens), first, lengths)
        for row, model in enumerate(models):
            model.insert_text(tokens[row, : lengths[row]].tolist(), int(first[row]))
            order = np.argsort(table.stamps[row])
            held = [tuple(x) for x in np.asarray(table.ngrams[row]).T[order].tolist()]
            assert [x for x in held if x[-1] >= 0] == model.held
        first = lengths


_index_text = jax.jit(index_text)


def test_last_tokens_before_the_beginning_are_none() -> None:
    tokens = jnp.array([[5, 6, 7, 0], [8, 9, 0, 0]])
    np.testing.assert_array_equal(
        last_tokens(tokens, jnp.array([3, 1]), 3), [[5, 6, 7], [-1, -1, 8]]
    )


def test_memory_is_what_the_docstring_says() -> None:
    """Whatever the vocabulary: 4 · M · (N + 1) bytes per row, and the clock."""
    table = NGramTable.create(8, 5, 8192)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(table)) == 8 * (4 * 8192 * 6 + 4)
