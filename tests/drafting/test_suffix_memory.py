"""The memory of texts: what it proposes, what it forgets, its files, and that no output depends on
it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.drafting.acceptance_rates import Guess
from specjax.drafting.costs import Costs
from specjax.drafting.suffix_memory import _CHUNK, CONTEXTS, COUNTS
from specjax.generation.decoding import start
from tests.support.covering import left_out
from tests.support.random_models import CONFIG, quantized_model, random_prompts

PARAMS = quantized_model()
VOCAB = CONFIG.vocab_size
FREE = Costs(np.ones(4, np.float32), np.float32(1))
NEW = 20
PROMPTS = random_prompts((9, 5, 12, 9, 3), VOCAB)
PROMPTS.append(PROMPTS[0])


follow = jax.jit(specjax.SuffixMemory.follow, static_argnames="most")


def guessed(memory: specjax.SuffixMemory, text: Sequence[int], most: int) -> Guess:
    """Follows a text, which is padded so that few programs are compiled."""
    tokens = np.zeros((1, 1 << 10), np.int32)
    tokens[0, : len(text)] = text
    guess = jax.device_get(follow(memory, tokens, np.array([len(text)], np.int32), most=most))
    return jax.tree.map(lambda leaf: leaf[0], guess)


def proposed(memory: specjax.SuffixMemory, text: Sequence[int], most: int = 5) -> list[int]:
    guess = guessed(memory, text, most)
    return guess.tokens[: guess.counts].tolist()


def kinds(memory: specjax.SuffixMemory, text: Sequence[int]) -> list[int]:
    guess = guessed(memory, text, 5)
    return guess.kinds[: guess.counts].tolist()


class Dictionary:
    """The same table as a dictionary of whole contexts; only the places are the memory's."""

    def __init__(self, memory: specjax.SuffixMemory) -> None:
        self.address = jax.jit(memory._address)
        self.held: dict[tuple[int, int], tuple[tuple[int, ...], int, int]] = {}

    def contexts(self, windows: list[list[int]]) -> list[list[tuple[int, int, tuple[int, ...]]]]:
        """The level, the slot and the tokens of every context that ends a window."""
        padded = np.zeros((64, CONTEXTS[-1]), np.int32)  # one shape for all
        padded[: len(windows)] = windows
        slots = np.asarray(self.address(padded)[0])[: len(windows)].tolist()
        return [
            [(level, own[level], tuple(window[-n:])) for level, n in enumerate(CONTEXTS)]
            for window, own in zip(windows, slots, strict=True)
        ]

    def add(self, text: list[int]) -> None:
        padded = [-1] * CONTEXTS[-1] + text
        windows = [padded[place : place + CONTEXTS[-1]] for place in range(len(text))]
        contexts = self.contexts(windows) if text else []
        for begin in range(0, len(text), _CHUNK):
            before = dict(self.held)  # tokens of a chunk are written at once
            for place in range(max(begin, 1), min(begin + _CHUNK, len(text))):
                for level, slot, context in contexts[place]:
                    known, token, count = before.get((level, slot), ((), -1, 0))
                    if (known, token) == (context, text[place]):
                        count += 1
                    elif count > 1:
                        count -= 1
                    else:
                        known, token, count = context, text[place], 1
                    self.held[level, slot] = known, token, count

    def follow(self, text: list[int], most: int) -> list[tuple[int, int]]:
        window, found = ([-1] * CONTEXTS[-1] + text)[-CONTEXTS[-1] :], []
        while len(found) < most:
            known = [
                (level, *self.held[level, slot][1:])
                for level, slot, context in self.contexts([window])[0]
                if self.held.get((level, slot), ((),))[0] == context
            ]
            if not known:
                break
            level, token, count = known[-1]
            often = sum(count >= least for least in COUNTS) - 1
            found.append((token, level * len(COUNTS) + often))
            window = [*window[1:], token]
        return found


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31), capacity=st.sampled_from((1, 30, 1 << 16)))
def test_it_proposes_what_a_dictionary_of_contexts_does(seed: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    most = int(rng.integers(2, 9))
    texts = [rng.integers(0, most, rng.integers(0, 60)).tolist() for _ in range(3)]
    memory = specjax.SuffixMemory.create(10, capacity=capacity)
    dictionary, memory = Dictionary(memory), memory.add(texts)
    for text in texts:
        dictionary.add(text)
    for text in (*texts, rng.integers(0, most, 30).tolist()):
        query = text[: max(1, len(text) // 2)] or [1]
        expected = dictionary.follow(query, 5)
        assert list(zip(proposed(memory, query), kinds(memory, query), strict=True)) == expected


def test_long_texts_are_added_in_pieces_without_a_seam() -> None:
    text = np.random.default_rng(0).permutation(700).tolist()
    memory = specjax.SuffixMemory.create(700).add([text])
    for place in (254, 256, 258, 510, 600):
        assert proposed(memory, text[:place]) == text[place : place + 5]
        assert set(kinds(memory, text[:place])) == {(len(CONTEXTS) - 1) * len(COUNTS)}


def test_what_came_often_is_proposed_and_what_is_new_replaces_what_came_once() -> None:
    often = specjax.SuffixMemory.create(10).add([[1, 2, 3], [1, 2, 3], [1, 2, 4]])
    once = specjax.SuffixMemory.create(10).add([[1, 2, 3], [1, 2, 4]])
    assert proposed(often, [1, 2], 1) == [3] and proposed(once, [1, 2], 1) == [4]


def test_texts_do_not_run_into_each_other() -> None:
    memory = specjax.SuffixMemory.create(10).add([[1, 2, 3], [4, 5, 6]])
    assert proposed(memory, [1, 2]) == [3] and proposed(memory, [2, 3]) == []


def test_adding_leaves_the_memory_as_it_is() -> None:
    memory = specjax.SuffixMemory.create(10)
    memory.add([[1, 2, 3]])
    assert proposed(memory, [1, 2]) == []


@pytest.mark.parametrize("capacity", [1, 2, 40])
def test_a_full_memory_keeps_its_size_and_takes_new_texts(capacity: int) -> None:
    memory = specjax.SuffixMemory.create(VOCAB, capacity=capacity)
    for seed in range(10):
        memory = memory.add(random_prompts((30,), VOCAB, seed))
    (last,) = random_prompts((30,), VOCAB, 9)
    assert memory.entries.shape == (len(CONTEXTS), capacity, 3)
    assert int(memory.entries[..., 1].max()) < VOCAB
    assert capacity < 40 or proposed(memory, last[:29], 1) == last[29:]


def test_what_came_often_outlives_what_came_once() -> None:
    memory = specjax.SuffixMemory.create(VOCAB, capacity=1).add([[5, 6]] * 3)
    assert proposed(memory.add([[7, 8]]), [5], 1) == [6]
    assert proposed(memory.add([[7, 8]] * 4), [7], 1) == [8]


def auto(memory: specjax.SuffixMemory | None) -> specjax.Auto:
    return specjax.Auto(FREE, memory=memory)


def options(sampled: bool) -> dict[str, object]:
    shared: dict[str, object] = {"max_new_tokens": NEW, "stop_tokens": ()}
    if not sampled:
        return shared
    keys = jax.random.split(jax.random.key(3), len(PROMPTS))
    return shared | {"sampling": specjax.Sampling(temperature=0.5, top_k=9), "key": keys}


@pytest.mark.recompiled
@pytest.mark.parametrize("sampled", [False, left_out(True)], ids=["greedy", "sampled"])
def test_no_output_depends_on_the_memory_or_the_order_of_prompts(sampled: bool) -> None:
    shared = options(sampled)
    plain = specjax.decode_many(PARAMS, PROMPTS, rows=2, drafter=specjax.Autoregressive(), **shared)
    texts = [each.tokens for each in plain]
    empty = specjax.SuffixMemory.create(VOCAB)
    misleading = random_prompts((300,), VOCAB, 5)
    memories = {
        "cold": empty, "default": None, "warm": empty.add(texts), "foreign": empty.add(misleading),
        "full": specjax.SuffixMemory.create(VOCAB, capacity=7).add([*misleading, *texts]),
    }  # fmt: skip
    order = np.random.default_rng(1).permutation(len(PROMPTS))
    accepted = {}
    for name, memory in memories.items():
        for places in (np.arange(len(PROMPTS)), order):
            ours = specjax.decode_many(
                PARAMS, [PROMPTS[place] for place in places], rows=2, drafter=auto(memory),
                **shared | ({"key": shared["key"][places]} if sampled else {}),
            )  # fmt: skip
            for place, result in zip(places, ours, strict=True):
                np.testing.assert_array_equal(result.tokens, texts[place], err_msg=name)
        accepted[name] = sum(int(each.stats.accepted) for each in ours)
    assert accepted["warm"] > 3 * max(accepted["foreign"], 20), "a case that tests nothing"
    assert accepted["cold"] == accepted["default"]


@pytest.mark.exhaustive
def test_prompts_of_a_call_share_a_memory_and_the_next_call_profits_from_it() -> None:
    first = specjax.decode_many(
        PARAMS, [PROMPTS[0]] * 2, rows=1, drafter=auto(None), **options(False)
    )
    assert int(first[1].stats.rounds) < NEW // 3 < int(first[0].stats.rounds)
    memory = specjax.SuffixMemory.create(VOCAB).add(each.tokens for each in first)
    alone = specjax.decode(PARAMS, [PROMPTS[0]], drafter=auto(memory), **options(False))
    assert int(alone.stats.rounds[0]) < NEW // 3
    np.testing.assert_array_equal(alone.tokens[0], first[0].tokens)
    streamed = list(specjax.stream(PARAMS, PROMPTS[0], drafter=auto(memory), **options(False)))
    assert len(streamed) == int(alone.stats.rounds[0])


@pytest.mark.exhaustive
def test_rows_of_a_batch_draft_for_each_other() -> None:
    """A row that begins later with the same prompt has what the row before it wrote."""
    apart = specjax.decode(PARAMS, [PROMPTS[0]] * 2, drafter=auto(None), **options(False))
    memory = specjax.SuffixMemory.create(VOCAB)
    state = start(PARAMS, [PROMPTS[0]] * 2, drafter=auto(memory), **options(False))
    assert proposed(state.shared, PROMPTS[0][:-1], 1) == PROMPTS[0][-1:]
    together = specjax.decode(PARAMS, [PROMPTS[0]] * 2, drafter=auto(memory), **options(False))
    np.testing.assert_array_equal(together.tokens, apart.tokens)


@pytest.mark.exhaustive
def test_a_memory_goes_through_jit_and_vmap() -> None:
    memory = specjax.SuffixMemory.create(VOCAB)
    keys = jax.random.split(jax.random.key(0), 2)
    sampling = specjax.Sampling(temperature=0.5)

    def tokens(memory: specjax.SuffixMemory | None, key: jax.Array) -> jax.Array:
        return specjax.decode(
            PARAMS, jnp.array(PROMPTS[0]), max_new_tokens=8, drafter=auto(memory),
            sampling=sampling, key=key,
        ).tokens  # fmt: skip

    alone = [tokens(None, key) for key in keys]
    warm = memory.add(np.asarray(each[0]) for each in alone)
    for one in (memory, warm):
        together = jax.jit(jax.vmap(lambda key, one=one: tokens(one, key)))(keys)
        np.testing.assert_array_equal(together, jnp.stack(alone))


def test_a_memory_comes_back_from_its_directory(tmp_path: Path) -> None:
    memory = specjax.SuffixMemory.create(VOCAB, capacity=50).add(PROMPTS)
    memory.save(tmp_path / "memory")
    again = specjax.SuffixMemory.load(tmp_path / "memory")
    assert again.vocab_size == VOCAB
    np.testing.assert_array_equal(again.entries, memory.entries)
    made = specjax.drafting.make("auto", memory=str(tmp_path / "memory"))
    np.testing.assert_array_equal(made.memory.entries, memory.entries)


@pytest.mark.parametrize("name", ["notes", "notes/diary.txt"])
def test_nothing_but_a_memory_is_replaced(tmp_path: Path, name: str) -> None:
    memory = specjax.SuffixMemory.create(VOCAB, capacity=4)
    (tmp_path / "notes").mkdir()
    memory.save(tmp_path / "notes")
    memory.save(tmp_path / "notes")
    (tmp_path / "notes" / "suffix_memory.json").rename(tmp_path / "notes" / "diary.txt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"{name} exists and is not a suffix memory; give a new"):
        memory.save(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def _changed(values: dict[str, object]) -> bytes:
    usual = {"version": 1, "vocab_size": VOCAB, "contexts": CONTEXTS}
    return json.dumps(usual | values).encode()


def _entries(token: int = 0, count: int = 0) -> np.ndarray:
    entries = np.zeros((len(CONTEXTS), 4, 3), np.uint32)
    entries[0, 0, 1:3] = token, count
    return entries


@pytest.mark.parametrize(
    ("manifest", "entries", "message"),
    [
        (b"{", None, "is not valid JSON"),
        (_changed({"version": 9}), None, "is a suffix memory of version 9; this specjax reads"),
        (_changed({"contexts": [3]}), None, "is a suffix memory of version 1"),
        (_changed({"vocab_size": "many"}), None, "vocab_size must be an integer from 1"),
        (None, b"nothing", "is truncated or damaged"),
        (None, _entries().astype(np.int64), r"must hold uint32\[any, any, any\], got int64"),
        (None, _entries()[..., :2], r"must hold uint32\[5, 1 … 67108864, 3\]"),
        (None, _entries(token=VOCAB), f"must hold tokens below {VOCAB} and counts up to 255"),
        (None, _entries(count=256), "counts up to 255, and holds others"),
    ],
)
def test_a_damaged_or_foreign_directory_is_refused(
    tmp_path: Path, manifest: bytes | None, entries: np.ndarray | bytes | None, message: str
) -> None:
    specjax.SuffixMemory.create(VOCAB, capacity=4).save(tmp_path)
    if manifest is not None:
        (tmp_path / "suffix_memory.json").write_bytes(manifest)
    if isinstance(entries, bytes):
        (tmp_path / "entries.npy").write_bytes(entries)
    elif entries is not None:
        np.save(tmp_path / "entries.npy", entries)
    with pytest.raises(ValueError, match=message):
        specjax.SuffixMemory.load(tmp_path)


def test_a_directory_without_a_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a suffix memory: it has no suffix_memory\.json"):
        specjax.SuffixMemory.load(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[VOCAB]], f"texts must hold tokens from 0 to {VOCAB - 1}, got {VOCAB}"),
        ([[1, -1]], "got -1"),
        (["word"], "texts must be lists of token ids, got 'word'"),
        ([[0.5]], "texts must be lists of token ids"),
        ([[[1], [2]]], "texts must be lists of token ids"),
        ([[1, [2]]], "texts must be lists of token ids"),
        (5, "texts must be lists of token ids, got 5"),
    ],
)
def test_texts_that_are_none_are_refused(given: object, message: str, wrong_types: None) -> None:
    with pytest.raises(ValueError, match=message):
        specjax.SuffixMemory.create(VOCAB).add(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [0, -1, 2**27, 1.5, True])
def test_a_capacity_out_of_its_range_is_refused(capacity: object, wrong_types: None) -> None:
    with pytest.raises(ValueError, match="capacity must be an integer"):
        specjax.SuffixMemory.create(VOCAB, capacity=capacity)  # type: ignore[arg-type]


def test_a_memory_that_does_not_fit_is_refused() -> None:
    foreign = specjax.SuffixMemory.create(VOCAB + 1)
    with pytest.raises(ValueError, match=f"memory was made for a vocabulary of {VOCAB + 1}"):
        specjax.decode(PARAMS, PROMPTS[0], drafter=auto(foreign))
    with pytest.raises(ValueError, match=r"memory of an Auto must be what specjax\.SuffixMemory"):
        specjax.decode(PARAMS, PROMPTS[0], drafter=auto("memory"))  # type: ignore[arg-type]
    own = auto(specjax.SuffixMemory.create(VOCAB))
    with pytest.raises(ValueError, match="inner of a MultiLevel takes no memory"):
        specjax.MultiLevel(specjax.QSpec(), own)
    mesh = specjax.parallel.mesh(data=1, tensor=1)
    divided = specjax.parallel.shard(PARAMS, mesh)
    with pytest.raises(ValueError, match="memory must be None for a model that is divided"):
        specjax.decode(divided, PROMPTS[0], drafter=own)
    plain = specjax.decode_many(PARAMS, PROMPTS[:2], **options(False))
    ours = specjax.decode_many(divided, PROMPTS[:2], **options(False))
    for one, other in zip(plain, ours, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
