"""Token trees: built without duplicates, scored like chains, accepted like plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import specjax
from checkpoints_tools.quantization import quantize
from pallas_kernels import attention_reference
from specjax import DraftModel, MultiLevel
from specjax.drafting.lookahead import Lookahead
from specjax.generation.decoding import start
from specjax.model.kv_cache import KVCache
from specjax.model.transformer import forward
from specjax.speculation import trees
from specjax.speculation.acceptance import sample_path
from specjax.speculation.rounds import step
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import Proposal
from specjax.speculation.walk import Walk, walk
from tests.kernels.test_cpu_attention import CACHES, as_a_chain, make_case, operands_of, same_bits
from tests.support.covering import left_out, representatives
from tests.support.random_models import CONFIG, random_model, random_prompts
from tests.support.tree_drafter import TreeDrafter

TARGET = random_model(CONFIG)
MXFP4, INT8 = quantize(TARGET, "mxfp4"), quantize(TARGET, "int8")
PROMPTS = random_prompts((1, 3, 7, 12), CONFIG.vocab_size)
NEW = 24

sequences = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=5)


def trie(rows: list[list[int]], nodes: int) -> list[tuple[int, int]]:
    """(token, parent) of every node, by a dictionary from prefixes to nodes."""
    numbers: dict[tuple[int, ...], int] = {(): -1}
    found = []
    for row in rows:
        for end in range(1, len(row) + 1):
            prefix = tuple(row[:end])
            if prefix not in numbers:
                numbers[prefix] = len(found)
                found.append((prefix[-1], numbers[prefix[:-1]]))
    return found[:nodes]


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(sequences, min_size=2, max_size=2), nodes=st.sampled_from([1, 6, 24]))
def test_sequences_make_the_trie_that_a_dictionary_makes(batch, nodes) -> None:
    padded = np.full((2, 5, 4), 1, np.int32)
    lengths = np.zeros((2, 5), np.int32)
    for b, rows in enumerate(batch):
        for c, row in enumerate(rows):
            padded[b, c, : len(row)] = row
            lengths[b, c] = len(row)
    build = jax.jit(trees.from_sequences, static_argnames="nodes")
    tokens, parents, counts = build(jnp.asarray(padded), jnp.asarray(lengths), nodes=nodes)
    for b, rows in enumerate(batch):
        expected = trie(rows, nodes)
        assert counts[b] == len(expected)
        pairs = list(zip(tokens[b].tolist(), parents[b].tolist(), strict=True))
        assert pairs == expected + [(0, -1)] * (nodes - len(expected))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(*[st.integers(-1, i - 1) for i in range(n)])))
def test_paths_by_walking_upwards(parents) -> None:
    paths = jax.jit(trees.ancestors)(jnp.asarray([parents], jnp.int32))
    for node, path in enumerate(paths[0].tolist()):
        expected = [node]
        while parents[expected[0]] >= 0:
            expected.insert(0, parents[expected[0]])
        assert path == expected + [-1] * (len(parents) - len(expected))
        assert trees.depths(paths)[0, node] == len(expected) - 1


# --- Scoring: a node gets the bits that it would get at the end of its path alone.


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.covering(1)
def test_the_reference_reads_a_path_as_a_chain(window: int | None, cache: str) -> None:
    """As `test_cpu_attention.test_a_trees_path_is_its_chain` for the C++ library."""
    options = {"window": window, "head_scale": 0.2}
    attend = jax.jit(partial(attention_reference.attention, **options))
    for length in (0, 120, 127, 300):
        case = make_case(1, 13, 4, 2, 24, 512, [length], cache=cache, mask="tree", window=window)
        tree = np.asarray(attend(*operands_of(case)))
        for path in np.asarray(case["ancestors"][0])[[0, 8, 12]]:
            path = path[path >= 0]
            chain = as_a_chain(case, path)
            same_bits(np.asarray(attend(*operands_of(chain)))[0], tree[0, path])


@pytest.mark.recompiled
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 16), ("bfloat16", 16), ("float32", 8),
                                             ("bfloat16", 4)])  # fmt: skip
@pytest.mark.covering(1)
def test_logits_are_those_of_plain_decoding(dtype: str, bits: int, window: int | None) -> None:
    config = dataclasses.replace(CONFIG, dtype=dtype, sliding_window=window)
    params = random_model(config)
    run = jax.jit(forward)
    rng = np.random.default_rng(0)
    _, cache = run(params, jnp.asarray(rng.integers(0, 96, (1, 126))), jnp.arange(126)[None],
                   KVCache.create(config, 1, 200, bits))  # fmt: skip

    @settings(max_examples=6, deadline=None)
    @given(
        parents=st.tuples(*[st.integers(-1, i - 1) for i in range(9)]),
        length=st.sampled_from([0, 20, 122, 126]),
    )
    def check(parents: tuple[int, ...], length: int) -> None:
        tokens = jnp.asarray(rng.integers(0, config.vocab_size, (1, 9)), jnp.int32)
        context = cache.with_lengths(jnp.array([length], jnp.int32))
        paths = trees.ancestors(jnp.asarray([parents], jnp.int32))
        logits, _ = run(params, tokens, length + trees.depths(paths), context, paths)
        after = {-1: context}  # the cache after every node's path, one token at a time
        for node, parent in enumerate(parents):
            at = after[parent].lengths
            alone, filled = run(params, tokens[:, node : node + 1], at[:, None], after[parent])
            after[node] = filled.with_lengths(at + 1)
            same_bits(np.asarray(alone[0, 0]), np.asarray(logits[0, node]))

    check()


# --- The round: greedy output is bit-identical to plain decoding's.

DRAFTERS = {
    "one branch": TreeDrafter(MXFP4, (1, 1, 1)),
    "the best branch last": TreeDrafter(MXFP4, (3, 2, 1)),
    "of all sizes": TreeDrafter(MXFP4, (2, 2), varied=True),
    "not all verifiable": TreeDrafter(INT8, (2, 2, 2), aside=True),
    "below a level": MultiLevel(DraftModel(INT8, 4), TreeDrafter(MXFP4, (2, 2))),
    "below a level in one cache": MultiLevel(
        DraftModel(INT8, 4, share_cache=True), TreeDrafter(MXFP4, (2, 2), varied=True)
    ),
}


@pytest.mark.recompiled
@pytest.mark.parametrize("name", representatives(DRAFTERS, "of all sizes"))
def test_greedy_output_does_not_change(name: str) -> None:
    options = {"max_new_tokens": NEW, "stop_tokens": (3,)}
    plain = specjax.decode(TARGET, PROMPTS, drafter=specjax.Autoregressive(), **options)
    result = specjax.decode(TARGET, PROMPTS, drafter=DRAFTERS[name], **options)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.lengths, plain.lengths)
    for counts in (result.stats, *result.levels):
        assert counts.accepted.sum() > 0, "nothing was ever accepted"
        assert (counts.accepted <= counts.tested).all()
        assert (counts.tested <= counts.drafted).all()


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("name", ["the best branch last", left_out("of all sizes")])
@pytest.mark.covering(1)
def test_cache_is_that_of_plain_decoding_after_every_round(name: str, bits: int) -> None:
    options = {"max_new_tokens": NEW, "cache_bits": bits, "cache_capacity": 128}
    plain = start(TARGET, PROMPTS, drafter=specjax.Autoregressive(), **options)
    while not plain.finished.all():
        plain, _ = step(TARGET, plain, specjax.Autoregressive())
    state = start(TARGET, PROMPTS, drafter=DRAFTERS[name], **options)
    moved = False
    while not state.finished.all():
        state, verified = step(TARGET, state, DRAFTERS[name])
        moved |= bool((verified.nodes > jnp.arange(verified.nodes.shape[1])).any())
        np.testing.assert_array_equal(state.cache.lengths, state.lengths - 1)
        same_entries(state.cache, plain.cache)
    assert moved, "no entry ever had to move"


def same_entries(cache: KVCache, expected: KVCache) -> None:
    """The committed slots of `cache` hold what `expected` does."""
    held = [jax.tree.leaves((each.keys, each.values)) for each in (cache, expected)]
    for ours, theirs in zip(*held, strict=True):
        for row, length in enumerate(np.asarray(cache.lengths)):
            np.testing.assert_array_equal(ours[row, :, :length], theirs[row, :, :length])


@pytest.mark.exhaustive
def test_a_levels_own_cache_is_what_its_model_writes() -> None:
    drafter = DRAFTERS["below a level"]
    state = start(TARGET, PROMPTS, drafter=drafter, max_new_tokens=NEW)
    for _ in range(5):
        state, _ = step(TARGET, state, drafter)
    own = state.draft.outer.cache
    again = start(
        INT8, state.tokens, prompt_lengths=state.lengths, max_new_tokens=1,
        drafter=specjax.Autoregressive(), cache_capacity=own.capacity,
    )  # fmt: skip
    same_entries(own.with_lengths(jnp.minimum(own.lengths, state.lengths - 1)), again.cache)


@pytest.mark.exhaustive
def test_the_drafter_is_told_what_the_target_would_say_after_every_node() -> None:
    """Also after those that are not verifiable, and when sampling."""
    drafter = DRAFTERS["not all verifiable"]
    for sampling in (None, Sampling()):
        key = None if sampling is None else jax.random.key(0)
        before = start(
            TARGET, PROMPTS, drafter=drafter, max_new_tokens=NEW, sampling=sampling, key=key
        )
        _, verified = step(TARGET, jax.tree.map(jnp.copy, before), drafter)
        paths = np.asarray(trees.ancestors(jnp.asarray([drafter.parents])))[0]
        texts = [
            [*prompt, *(int(verified.proposed[row, node]) for node in path if node >= 0)]
            for row, prompt in enumerate(PROMPTS)
            for path in (np.array([-1]), *paths)
        ]
        expected = specjax.decode(TARGET, texts, max_new_tokens=1, drafter=specjax.Autoregressive())
        said = np.asarray(expected.tokens)[np.arange(len(texts)), [len(text) for text in texts]]
        np.testing.assert_array_equal(verified.choices.reshape(-1), said)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "drafter",
    [
        DRAFTERS["the best branch last"],
        DRAFTERS["below a level"],
        Lookahead(ngram=3, window=3, guesses=2, capacity=256),
    ],
    ids=["the best branch last", "below a level", "Lookahead"],
)
def test_caches_are_updated_in_place(drafter: specjax.Drafter) -> None:
    def temporaries(capacity: int) -> int:
        state = start(TARGET, PROMPTS, drafter=drafter, max_new_tokens=8, cache_capacity=capacity)
        return step.lower(TARGET, state, drafter).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048) <= temporaries(256) + 4096


# --- Sampling: by enumeration over a tiny vocabulary.

VOCABULARY, PARENTS = 3, (-1, -1, 0, 0, -1, 1)
Draft = tuple[float, list[int], list[np.ndarray]]  # its probability, tokens, and their q


def without_chance(rng: np.random.Generator) -> Iterator[Draft]:
    tokens = [2, 0, 1, 0, 1, 0]
    yield 1.0, tokens, list(np.eye(VOCABULARY)[tokens])


def independent(rng: np.random.Generator) -> Iterator[Draft]:
    """Siblings from one distribution."""
    of_parent = {parent: rng.dirichlet(np.ones(VOCABULARY)) for parent in sorted(set(PARENTS))}
    q = [of_parent[parent] for parent in PARENTS]
    for tokens in itertools.product(range(VOCABULARY), repeat=len(PARENTS)):
        yield float(np.prod([q[i][x] for i, x in enumerate(tokens)])), list(tokens), q


def without_replacement(rng: np.random.Generator) -> Iterator[Draft]:
    of_parent = {parent: rng.dirichlet(np.ones(VOCABULARY)) for parent in sorted(set(PARENTS))}
    for tokens in itertools.product(range(VOCABULARY), repeat=len(PARENTS)):
        q = [of_parent[parent].copy() for parent in PARENTS]
        for i, parent in enumerate(PARENTS):
            q[i][[tokens[j] for j in range(i) if PARENTS[j] == parent]] = 0
            q[i] /= q[i].sum()
        probability = float(np.prod([q[i][x] for i, x in enumerate(tokens)]))
        if probability > 0:
            yield probability, list(tokens), q


def outcomes(draft: Draft, target: np.ndarray) -> dict[tuple[tuple[int, ...], int], float]:
    """Probability of every (accepted nodes, token after them), by the words of `sample_path`."""
    _, tokens, q = draft
    found: dict[tuple[tuple[int, ...], int], float] = defaultdict(float)

    def follow(nodes: tuple[int, ...], weight: float) -> None:
        node = nodes[-1] if nodes else -1
        p = target[node + 1]
        for child in (i for i, parent in enumerate(PARENTS) if parent == node):
            keep = min(1.0, p[tokens[child]] / q[child][tokens[child]])
            follow((*nodes, child), weight * keep)
            weight *= 1 - keep
            if weight < 1e-12:
                return
            p = np.maximum(p - q[child], 0)
            p /= p.sum()
        for token, share in enumerate(p):
            found[nodes, token] += weight * share

    follow((), 1.0)
    return found


def test_a_round_draws_as_many_tokens_as_it_gains() -> None:
    """A row walks down the tree; the loop ends with the row that keeps most."""
    state = start(
        TARGET, PROMPTS[:3], max_new_tokens=NEW, sampling=Sampling(temperature=0.9, top_p=0.9),
        key=jax.random.key(4), drafter=specjax.Autoregressive(), stop_tokens=(),
    )  # fmt: skip
    parents = jnp.array([[-1, -1, 1, 1, 3]] * 3)
    logits = jax.random.normal(jax.random.key(5), (3, 6, CONFIG.vocab_size))
    meant = jnp.ones((3, 5), bool)

    def end(tokens: jax.Array) -> Walk:
        return jax.jit(walk)(state, Proposal(tokens, parents=parents), meant, logits)

    tokens = jnp.full((3, 5), -1)
    first = end(tokens)
    assert int(first.depth) == 1 and not (np.asarray(first.nodes) >= 0).any()
    # Row 0 goes on by node 1, then by node 3; row 1 by node 0, which has no child.
    tokens = tokens.at[0, 1].set(first.emitted[0, 0]).at[1, 0].set(first.emitted[1, 0])
    second = end(tokens)
    assert int(second.depth) == 2
    third = end(tokens.at[0, 3].set(second.emitted[0, 1]))
    assert int(third.depth) == 3 and third.distributions is None
    np.testing.assert_array_equal(third.nodes[:, :3], [[1, 3, -1], [0, -1, -1], [-1, -1, -1]])
    np.testing.assert_array_equal(third.emitted[:, :1], first.emitted[:, :1])
    np.testing.assert_array_equal(third.emitted[:, 3:], 0)
    # A row keeps no draft that does not count, and a finished row draws nothing.
    meant = meant.at[0, 1].set(False)
    state = dataclasses.replace(state, finished=jnp.array([False, True, False]))
    last = end(tokens)
    assert int(last.depth) == 1 and int(last.emitted[1, 0]) == 0


KINDS = (without_chance, independent, without_replacement)


@pytest.mark.parametrize("kind", KINDS)
def test_every_emitted_token_has_the_targets_distribution(kind) -> None:
    """The rule itself, exactly: over all drafts, for the first token and for those after a node."""
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.ones(VOCABULARY), len(PARENTS) + 1)
    emitted = np.zeros((len(PARENTS) + 1, VOCABULARY))  # after the last token and after each node
    for draft in kind(rng):
        for (nodes, last), probability in outcomes(draft, target).items():
            tokens = [*(draft[1][node] for node in nodes), last]
            for node, token in zip((-1, *nodes), tokens, strict=True):
                emitted[node + 1, token] += draft[0] * probability
    np.testing.assert_allclose(emitted, target * emitted.sum(1, keepdims=True), atol=1e-12)


@pytest.mark.parametrize("kind", [independent, without_replacement])
def test_outcomes_are_as_frequent_as_the_rule_says(kind) -> None:
    rng = np.random.default_rng(1)
    target = rng.dirichlet(np.ones(VOCABULARY), len(PARENTS) + 1)
    drafts = list(kind(rng))
    drafts = [drafts[i] for i in rng.permutation(len(drafts))[:20]]
    each = 60_000 // len(drafts)

    def every(values: object) -> jax.Array:
        """For every draft, and for as many samples of it."""
        return jnp.repeat(jnp.asarray(values), each, axis=0)

    q = every([draft[2] for draft in drafts])
    rows = each * len(drafts)
    accepted, nodes, emitted = jax.jit(sample_path)(
        jax.random.split(jax.random.key(2), rows),
        every([draft[1] for draft in drafts]),
        jnp.broadcast_to(jnp.array(PARENTS, jnp.int32), (rows, len(PARENTS))),
        jnp.ones((rows, len(PARENTS)), bool),
        q.astype(jnp.float32),
        jnp.broadcast_to(jnp.asarray(target, jnp.float32), (rows, *target.shape)),
    )
    seen: dict[tuple, int] = defaultdict(int)
    for row, count in enumerate(np.asarray(accepted)):
        path = tuple(np.asarray(nodes)[row, :count].tolist())
        tokens = drafts[row // each][1]
        assert np.asarray(emitted)[row, :count].tolist() == [tokens[node] for node in path]
        seen[row // each, path, int(np.asarray(emitted)[row, count])] += 1
    statistic, freedom = 0.0, 0
    for index, draft in enumerate(drafts):
        expected = {key: each * p for key, p in outcomes(draft, target).items() if p > 1e-9}
        assert sum(seen[index, *key] for key in expected) == each, "what cannot be"
        for key, count in expected.items():
            statistic += (seen[index, *key] - count) ** 2 / count
        freedom += len(expected) - 1
    assert stats.chi2.sf(statistic, freedom) > 1e-3


SAMPLING_DRAFTERS = {
    "without chance": TreeDrafter(MXFP4, (2, 2)),
    "drawn": TreeDrafter(MXFP4, (2, 1), drawn=True),
    "below a level": MultiLevel(DraftModel(INT8, 2), TreeDrafter(MXFP4, (2, 1))),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", representatives(SAMPLING_DRAFTERS, "drawn"))
def test_decoding_samples_what_plain_decoding_samples(name: str) -> None:
    rows, counts = 4000, []
    prompt = jnp.broadcast_to(jnp.array([5, 6, 7]), (rows, 3))
    for seed, each in ((0, specjax.Autoregressive()), (1, SAMPLING_DRAFTERS[name])):
        result = specjax.decode(
            TARGET, prompt, max_new_tokens=2, drafter=each, key=jax.random.key(seed),
            sampling=Sampling(top_k=4),
        )  # fmt: skip
        pairs = np.asarray(result.tokens[:, 3]) * CONFIG.vocab_size + result.tokens[:, 4]
        counts.append(np.bincount(pairs, minlength=CONFIG.vocab_size**2))
    table = np.stack(counts)
    table = table[:, table.sum(0) >= 20]
    assert table.shape[1] >= 6
    assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    ],
    ids=repr,
)
def test_penalties_count_the_path_alone(penalty: dict[str, Any]) -> None:
    """With one token to draw from, sampling is greedy decoding with a penalty."""
    options = {
        "sampling": Sampling(top_k=1, **penalty),
        "key": jax.random.key(0), "max_new_tokens": NEW,
    }  # fmt: skip
    plain = specjax.decode(TARGET, PROMPTS, drafter=specjax.Autoregressive(), **options)
    drafter = TreeDrafter(TARGET, (3, 2, 1))
    result = specjax.decode(TARGET, PROMPTS, drafter=drafter, **options)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert result.stats.accepted.sum() > 0
