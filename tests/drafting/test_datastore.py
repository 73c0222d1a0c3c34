"""Datastores: the search finds what a scan finds, and the tree holds the most shared prefixes."""

from __future__ import annotations

import json
import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.drafting.datastore import ORDERED, Datastore
from specjax.drafting.retrieval import best_nodes
from specjax.evaluation.corpus import build_datastore, tokenize
from specjax.evaluation.digests import digest
from specjax.files.locks import try_lock
from tests.support.covering import representatives
from tests.support.random_models import quantized_model, random_prompts

VOCABULARY = 4
texts = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40), min_size=1, max_size=6
)


def _occurrences(sequences: list[list[int]], query: list[int]) -> int:
    return sum(
        sequence[start : start + len(query)] == query
        for sequence in sequences
        for start in range(len(sequence))
    )


@settings(max_examples=20, deadline=None)
@given(texts, st.integers(1, ORDERED), st.integers(0, 2**31 - 1))
def test_search_finds_every_occurrence_and_nothing_else(sequences, length, seed) -> None:
    store = Datastore.create([np.array(sequence) for sequence in sequences], VOCABULARY)
    rng = np.random.default_rng(seed)
    queries = rng.integers(0, VOCABULARY, (6, ORDERED))
    inside = rng.choice(np.asarray(store.suffixes), 3)
    queries[:3] = np.asarray(store.tokens)[inside[:, None] + np.arange(ORDERED)]  # such as occur
    first, count = store.find(jnp.asarray(queries), jnp.full(6, length))
    for query, start, number in zip(queries, first, count, strict=True):
        wanted = query[:length].tolist()
        expected = 0 if VOCABULARY in wanted else _occurrences(sequences, wanted)
        if VOCABULARY not in wanted:
            assert int(number) == expected
        for place in np.asarray(store.suffixes)[int(start) : int(start) + int(number)]:
            np.testing.assert_array_equal(store.tokens[place : place + length], wanted)


def test_reading_stops_where_a_sequence_ends() -> None:
    store = Datastore.create([np.array([1, 2, 3]), np.array([0])], VOCABULARY)
    tokens, valid = store.read(jnp.array([0, 2, 4]), 3)
    assert valid.tolist() == [3, 1, 1]
    assert tokens[0].tolist() == [1, 2, 3]


_best_nodes = jax.jit(best_nodes, static_argnums=2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=5), min_size=1, max_size=8),
    st.sampled_from((1, 2, 5, 12)),
)
def test_best_nodes_are_the_most_shared_prefixes(sequences, nodes) -> None:
    """Against a counter of prefixes: the same prefixes up to ties, each once, parents first."""
    padded, lengths = np.zeros((1, 8, 5), np.int32), np.zeros((1, 8), np.int32)
    for row, sequence in enumerate(sequences):
        padded[0, row, : len(sequence)] = sequence
        lengths[0, row] = len(sequence)
    tokens, parents, counts = (np.asarray(x)[0] for x in _best_nodes(padded, lengths, nodes))
    shares = Counter(
        tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)
    )
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens[:counts], parents[:counts], strict=True):
        assert parent < len(paths)
        paths.append(((*paths[parent], int(token))) if parent >= 0 else (int(token),))
    assert len(set(paths)) == len(paths) == min(nodes, len(shares))
    assert sorted((shares[path] for path in paths), reverse=True) == [
        number for _, number in shares.most_common(nodes)
    ]


def test_a_saved_datastore_is_read_back(tmp_path) -> None:
    store = Datastore.create([np.array([1, 2, 3, 1, 2])], VOCABULARY)
    store.save(tmp_path / "store")
    again = Datastore.load(tmp_path / "store")
    assert again.vocab_size == VOCABULARY
    jax.tree.map(np.testing.assert_array_equal, store, again)


# Writing replaces datastores and fills empty directories, nothing else.
@pytest.mark.parametrize("name", ["notes", "notes/diary.txt"])
def test_nothing_but_a_datastore_is_replaced(tmp_path, name) -> None:
    store = Datastore.create([np.array([1, 2, 3])], VOCABULARY)
    (tmp_path / "notes").mkdir()
    store.save(tmp_path / "notes")
    store.save(tmp_path / "notes")
    (tmp_path / "notes" / "datastore.json").rename(tmp_path / "notes" / "diary.txt")
    before = sorted(tmp_path.rglob("*"))
    message = f"{name} exists and is not a datastore; give a new path or a datastore to replace"
    with pytest.raises(ValueError, match=message):
        store.save(tmp_path / name)
    with pytest.raises(ValueError, match=message):  # before it looks for its corpus
        build_datastore(quantized_model(), _Numbers(), tmp_path / "no corpus", tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_datastores_get_one_sentence(tmp_path) -> None:
    with pytest.raises(ValueError, match="holds no tokens"):
        Datastore.create([], VOCABULARY)
    with pytest.raises(ValueError, match="token 9, outside the vocabulary of 4"):
        Datastore.create([np.array([1, 9])], VOCABULARY)
    with pytest.raises(ValueError, match="is not a datastore"):
        Datastore.load(tmp_path)
    Datastore.create([np.array([1])], VOCABULARY).save(tmp_path / "old")
    manifest = tmp_path / "old" / "datastore.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 0}))
    with pytest.raises(ValueError, match="version 0; this specjax reads version 1"):
        Datastore.load(tmp_path / "old")


def _claiming(size: int, shape: str) -> bytes:
    """An .npy file whose header claims more than there is."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".ljust(size - 11)
    return b"\x93NUMPY\x01\x00" + (size - 10).to_bytes(2, "little") + f"{header}\n".encode()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("datastore.json", b"[" * 100_000, "is nested too deeply"),
        ("datastore.json", b"[]", "must hold a JSON object, got list"),
        ("datastore.json", b'{"version": 1, "ordered": 16}', "vocab_size must be an integer"),
        ("tokens.npy", b"", "tokens.npy is truncated or damaged"),
        ("tokens.npy", _claiming(128, "(1000000000000,)"), "tokens.npy is truncated or damaged"),
        ("tokens.npy", np.full(17, 5, np.int32), "tokens.npy must hold numbers from 0 to 4, got 5"),
        ("tokens.npy", np.full(17, 2, np.int32), "tokens.npy does not end as a datastore's"),
        ("tokens.npy", np.full(17, 4.0), r"must hold int32\[any\], got float64\[17\]"),
        ("suffixes.npy", np.array([0, 99], np.int32), "must hold numbers from 0 to 2, got 99"),
        ("suffixes.npy", np.array([0, -1], np.int32), "must hold numbers from 0 to 2, got -1"),
        ("suffixes.npy", np.zeros((1, 1), np.int32), r"got int32\[1, 1\]"),
        ("suffixes.npy", None, "it has no suffixes.npy"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, damage, message) -> None:
    Datastore.create([np.array([1, 2])], 4).save(tmp_path / "store")
    file = tmp_path / "store" / name
    file.unlink()
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    elif damage is not None:
        np.save(file, damage)
    with pytest.raises(ValueError, match=message):
        Datastore.load(tmp_path / "store")


@pytest.fixture
def corpus(tmp_path):
    """Two kinds of paragraphs: what the model writes itself, and noise."""
    params = quantized_model()
    own = specjax.decode(params, random_prompts((1,) * 6, 96, seed=3), max_new_tokens=30)
    noise = np.random.default_rng(0).integers(0, 96, (6, 31))
    rows = [row for pair in zip(np.asarray(own.tokens), noise, strict=True) for row in pair]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in rows))
    return params, path, np.asarray(own.tokens)


class _Numbers:
    """Texts are numbers, and so are tokens."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))


@pytest.mark.exhaustive
def test_refinement_keeps_what_the_model_would_write(corpus, tmp_path) -> None:
    params, path, own = corpus
    store = build_datastore(params, _Numbers(), path, tmp_path / "out", keep=6, rows=4)
    kept = np.asarray(store.tokens)[: 6 * 32].reshape(6, 32)[:, :31]
    np.testing.assert_array_equal(kept, own)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"corpus.jsonl", "out"}  # the scores are gone


def test_a_killed_build_goes_on(corpus, tmp_path) -> None:
    params, path, _ = corpus
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 2:
            raise KeyboardInterrupt

    options = {"keep": 6, "rows": 2}
    with pytest.raises(KeyboardInterrupt):
        build_datastore(params, _Numbers(), path, tmp_path / "out", progress=stop, **options)
    assert not (tmp_path / "out").exists()
    again = []
    build_datastore(
        params, _Numbers(), path, tmp_path / "out",
        progress=lambda done, total: again.append(done), **options,
    )  # fmt: skip
    assert again == [6, 8, 10, 12]
    whole = build_datastore(params, _Numbers(), path, tmp_path / "whole", **options)
    jax.tree.map(np.testing.assert_array_equal, whole, Datastore.load(tmp_path / "out"))


def test_one_build_at_a_time(corpus, tmp_path) -> None:
    params, path, _ = corpus
    refused = []

    def again(*_: int) -> None:
        with pytest.raises(ValueError, match=r"another process is making .*/out already"):
            build_datastore(params, _Numbers(), path, tmp_path / "out", keep=6)
        refused.append(sorted(tmp_path.iterdir()))

    build_datastore(params, _Numbers(), path, tmp_path / "out", keep=6, progress=again)
    assert refused and (tmp_path / "out") not in refused[0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["corpus.jsonl", "out"]


# The scores of killed builds of other corpora go; those of one at work and of a namesake stay.
@pytest.mark.parametrize("refine", [True, False])
def test_scores_of_killed_builds_are_removed(corpus, tmp_path, refine) -> None:
    params, path, _ = corpus
    killed, at_work, namesake = (
        tmp_path / f".out.scores-{name}"
        for name in ("0123456789ab", "ba9876543210", "a.scores-0123456789ab")
    )
    for file in (killed, at_work, namesake):
        file.touch()
    lock = try_lock(at_work)
    build_datastore(params, _Numbers(), path, tmp_path / "out", keep=6, refine=refine)
    os.close(lock)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"corpus.jsonl", "out", at_work.name, namesake.name}


# A kill while the file of the scores is made leaves a part of it, which holds no scores.
def test_a_part_of_the_scores_file_holds_no_scores(corpus, tmp_path) -> None:
    params, path, _ = corpus
    expected = build_datastore(params, _Numbers(), path, tmp_path / "whole", keep=6)
    sequences = tokenize(_Numbers(), path, 256)
    np.full(3, np.nan, np.float32).tofile(tmp_path / f".out.scores-{digest(params, sequences)}")
    store = build_datastore(params, _Numbers(), path, tmp_path / "out", keep=6)
    jax.tree.map(np.testing.assert_array_equal, store, expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"1 2\x003 4 5", "holds zero bytes"),
        (b'{"title": "1 2 3 4 5"}\n', "line 1 of .* has no text in any of text, content"),
        (b'{"text": "1 2 3 4 5"}\n{\n', "line 2 of .* is not valid JSON"),
        (b'{"text": "1 2 3 400 5"}\n', "token 400, outside the vocabulary of 96"),
    ],
)
def test_bad_corpora_get_one_sentence(tmp_path, content, message) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build_datastore(quantized_model(), _Numbers(), path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "below", representatives([False, True], False), ids=["alone", "below a model"]
)
def test_retrieval_finds_what_the_model_goes_on_to_write(corpus, tmp_path, below) -> None:
    """The corpus holds the model's own texts, so what follows is mostly found."""
    params, path, own = corpus
    store = build_datastore(params, _Numbers(), path, tmp_path / "out", keep=6)
    drafter: specjax.Drafter = specjax.Retrieval(store, nodes=12, depth=4)
    if below:
        drafter = specjax.MultiLevel(specjax.QSpec(5), drafter)
    prompts = own[:3, :8].tolist()
    plain, drafted = (
        specjax.decode(params, prompts, max_new_tokens=20, drafter=each)
        for each in (specjax.Autoregressive(), drafter)
    )
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    counts = drafted.levels[0] if below else drafted.stats
    assert float(counts.tokens_per_round) > 1.8


def test_retrieval_from_another_vocabulary_is_refused() -> None:
    store = Datastore.create([np.array([1, 2])], VOCABULARY)
    with pytest.raises(ValueError, match="vocabulary of 4 entries; the model has 96"):
        specjax.decode(quantized_model(), [1, 2, 3], drafter=specjax.Retrieval(store))
    with pytest.raises(ValueError, match="nodes must be at least 1, got 0"):
        specjax.Retrieval(store, nodes=0)
    with pytest.raises(ValueError, match="longest must be in shortest=2 … 16, got 40"):
        specjax.Retrieval(store, longest=40)
