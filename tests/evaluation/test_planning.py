"""The planner: formulas against enumeration and simulation, memory against real arrays."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.quantization import quantize
from specjax import planning
from specjax.model.kv_cache import KVCache
from specjax.model.layers import Linear
from specjax.model.params import Params, stored
from specjax.model.sizes import most_that_fits
from specjax.model.transformer import forward
from specjax.planning import Level
from specjax.planning.speed import draft_time
from tests.support.random_models import CONFIG, random_model

SHARES = (0.0, 0.3, 0.85, 1.0)
MODEL = random_model(dataclasses.replace(CONFIG, num_layers=4))
PROMPTS = [[5, 9, 2, 44, 71, 3], [8, 8, 1]]
SKIP, PLAIN = specjax.LayerSkip((0,)), specjax.Autoregressive()


# Every way in which N drafts can be judged, with its probability.
@pytest.mark.parametrize("acceptance", SHARES)
@pytest.mark.parametrize("length", [1, 4, 7])
def test_expected_tokens(acceptance: float, length: int) -> None:
    expected = 0.0
    for kept in itertools.product((True, False), repeat=length):
        probability = math.prod(acceptance if each else 1 - acceptance for each in kept)
        expected += probability * (1 + sum(itertools.accumulate(kept, lambda a, b: a and b)))
    assert planning.expected_tokens(acceptance, length) == pytest.approx(expected)
    share = planning.accepted_share(acceptance, length)
    assert share == pytest.approx((expected - 1) / length)


def _gain(rng: np.random.Generator, level: Level) -> int:
    """Tokens of one simulated round: drafts are kept one by one, and the verifier adds a token."""
    kept = 0
    while kept < level.draft_length and rng.random() < level.acceptance:
        kept += 1
    return kept + 1


def _draft(rng: np.random.Generator, tokens: int, levels: list[Level], cost: float) -> float:
    """Time of one simulated draft of so many tokens."""
    if not levels:
        return tokens * cost
    first, *below = levels
    time = 0.0
    while tokens > 0:
        time += _draft(rng, first.draft_length, below, cost)
        time += first.verification(first.draft_length)
        tokens -= _gain(rng, first)
    return time


# A simulation of every single draft: its mean over 20,000 rounds is the formula's value.
@pytest.mark.parametrize(
    ("levels", "draft_cost"),
    [
        ([Level(0.8, 5, row_cost=0.02)], 0.25),
        ([Level(0.85, 6), Level(0.45, 2, pass_cost=0.25, row_cost=0.01)], 0.01),
        ([Level(0.9, 5), Level(0.7, 3, pass_cost=0.3), Level(0.4, 2, pass_cost=0.1)], 0.02),
    ],
)
def test_speedup_of_levels(levels: list[Level], draft_cost: float) -> None:
    rng = np.random.default_rng(0)
    target, *inner = levels
    tokens = time = 0.0
    for _ in range(20_000):
        time += _draft(rng, target.draft_length, inner, draft_cost)
        time += target.verification(target.draft_length)
        tokens += _gain(rng, target)
    assert planning.speedup(levels, draft_cost) == pytest.approx(tokens / time, rel=0.01)


# The rounds of a level can be counted by hand if every draft is kept, or none.
def test_rounds_that_a_draft_needs() -> None:
    assert planning.expected_rounds(8, 1.0, 3) == 2
    assert planning.expected_rounds(9, 1.0, 3) == 3
    assert planning.expected_rounds(8, 0.0, 3) == 8
    # Nine tokens take three whole rounds of which the last one makes three too many.
    assert planning.speedup(Level(1.0, 3), 0.0, 9) == pytest.approx(3)
    whole = planning.speedup(Level(0.7, 3), 0.1)
    assert planning.speedup(Level(0.7, 3), 0.1, 10_000) == pytest.approx(whole, rel=1e-3)
    assert draft_time(8, [Level(1.0, 3, pass_cost=0.25)], 0.01) == pytest.approx(2 * 0.28)


# ML-SpecQD's equation 1 is `speedup` in other words: α = G / N, S = 1 / draft cost.
@pytest.mark.parametrize("acceptance", SHARES)
@pytest.mark.parametrize("faster", [4, 20, 100])
def test_equation_1(acceptance: float, faster: int) -> None:
    share = planning.accepted_share(acceptance, 4)
    found = planning.ml_specqd_speedup([share], [4], [faster])
    assert found == pytest.approx(planning.speedup(Level(acceptance, 4), 1 / faster))
    assert found == pytest.approx((share + 0.25) / (0.25 + 1 / faster))


# The text beside ML-SpecQD's figures: 80-85 % and 40-45 % make about 3, and 2 to 2.5 alone.
def test_figures_2_and_3() -> None:
    def two(upper: float, lower: float) -> float:
        return planning.ml_specqd_speedup([upper, lower], [4, 4], [4, 100])

    assert 2.85 < two(0.8, 0.4) < two(0.85, 0.45) < 3.5
    for share, faster in ((0.8, 4), (0.85, 4), (0.4, 100)):
        assert 2 < planning.ml_specqd_speedup([share], [4], [faster]) < 2.6


def test_two_levels_by_equation_1_need_full_rounds() -> None:
    """Both formulas are the same if a level's draft is a whole number of its rounds."""
    levels = [Level(0.9, 8), Level(1.0, 3, pass_cost=0.25)]
    shares = [planning.accepted_share(0.9, 8), 1.0]
    expected = planning.ml_specqd_speedup(shares, [8, 3], [4, 100])
    assert planning.speedup(levels, 0.01) == pytest.approx(expected)


# The article's own figures for Llama-2-70B's drafts, put into its own formula.
def test_the_articles_ranking() -> None:
    drafts = {
        "FP16": (0.782, 5.8), "INT8": (0.771, 3.8), "INT4 g128": (0.724, 2.1),
        "INT4 g32": (0.738, 2.4), "INT3": (0.651, 1.8), "INT2": (0.542, 2.3),
    }  # fmt: skip
    found = {}
    for name, (acceptance, milliseconds) in drafts.items():
        cost = milliseconds / 22
        best = planning.best_draft_lengths(Level(acceptance, pass_cost=1.12), cost, 14)
        found[name] = planning.speedup(best, cost), best[0].draft_length
    assert found["INT4 g128"] == (pytest.approx(1.94, abs=0.01), 5)
    assert found["FP16"] == (pytest.approx(1.50, abs=0.01), 3)
    ranking = sorted(found, key=lambda name: found[name], reverse=True)
    assert set(ranking[:2]) == {"INT4 g128", "INT4 g32"} and ranking[-1] == "INT2"


def test_best_draft_lengths_are_the_best() -> None:
    levels = [Level(0.9, row_cost=0.02), Level(0.5, pass_cost=0.25)]
    best = planning.best_draft_lengths(levels, 0.02, 6)
    tried = [
        [dataclasses.replace(level, draft_length=n) for level, n in zip(levels, each, strict=True)]
        for each in itertools.product(range(1, 7), repeat=2)
    ]
    most = max(planning.speedup(each, 0.02) for each in tried)
    assert planning.speedup(best, 0.02) == most


def test_the_search_takes_no_longer_with_every_level_than_it_must() -> None:
    """It finds what all combinations hold, and ends with three levels of up to 64 drafts."""
    levels = [Level(0.8, pass_cost=0.3, row_cost=0.01), Level(0.5, pass_cost=0.1)]
    found = planning.fastest_drafts(5, levels, 0.02, 4)
    tried = (
        [dataclasses.replace(level, draft_length=n) for level, n in zip(levels, each, strict=True)]
        for each in itertools.product(range(1, 5), repeat=2)
    )
    assert list(found) == min(tried, key=lambda each: draft_time(5, each, 0.02))
    best = planning.best_draft_lengths([Level(0.9), *levels], 0.02, 64)
    assert planning.best_draft_lengths([Level(0.9), *levels], 0.02, 32) == best


def test_measured_costs_go_before_the_line() -> None:
    level = Level(0.5, 2, row_cost=0.1, measured=(1.0, 1.0, 1.5))
    assert [level.verification(n) for n in (0, 2, 3)] == [1.0, 1.5, pytest.approx(1.3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Level(1.2), "acceptance must be in 0 … 1, got 1.2"),
        (lambda: Level(math.nan), "acceptance must be in 0 … 1, got nan"),
        (lambda: Level(0.5, 0), "draft_length must be at least 1, got 0"),
        (lambda: Level(0.5, row_cost=-1.0), "row_cost must be 0 or more"),
        (lambda: Level(0.5, pass_cost=0.0), "pass_cost must be more than 0"),
        (lambda: planning.speedup(Level(0.5), -0.1), "draft_cost must be 0 or more"),
        (lambda: planning.speedup(Level(0.5), math.nan), "draft_cost must be 0 or more"),
        (lambda: planning.speedup([], 0.1), "at least one Level"),
        (lambda: planning.speedup(Level(0.5), 0.1, 0), "tokens must be at least 1, got 0"),
        (lambda: planning.best_draft_lengths(Level(0.5), 0.1, 0), "longest must be at least 1"),
        (lambda: planning.ml_specqd_speedup([0.5], [4, 4], [4]), "as many levels"),
        (lambda: planning.ml_specqd_speedup([0.5], [4], [0]), "times_faster must be more than 0"),
        (lambda: planning.weight_bytes(CONFIG, "int5"), "weights must be one of plain, int4"),
        (lambda: planning.cache_bytes(CONFIG, 0, 8), "rows must be at least 1, got 0"),
        (lambda: planning.plan_memory(CONFIG, share_cache=True), "draft must name"),
        (lambda: planning.search_layers(MODEL, [1, 2]), r"tokens must be int32\[S, T\]"),
        (lambda: planning.search_layers(MODEL, [[1, 96]]), "tokens must be in 0 … 95"),
        (lambda: planning.search_layers(MODEL, [[1, 2]], least=4), "least must be in 1 … 3"),
        (lambda: planning.measure(MODEL, SKIP, PROMPTS, turns=0), "turns"),
        (lambda: planning.measure(MODEL, SKIP, PROMPTS, rows=9), "rows must be"),
        (lambda: planning.measure(MODEL, "fast", PROMPTS), "drafter must be a drafter"),
        (
            lambda: planning.measure(MODEL, PLAIN, PROMPTS, max_new_tokens=1),
            "drafter must propose something",
        ),
        (
            lambda: planning.measure(MODEL, specjax.MultiLevel(SKIP, PLAIN), PROMPTS),
            "drafter must propose something",
        ),
        (lambda: planning.measure(MODEL, specjax.Auto(), PROMPTS), "must propose chains"),
        (
            lambda: planning.measure(MODEL, specjax.MultiLevel(SKIP, specjax.Auto()), PROMPTS),
            "must propose chains",
        ),
        (
            lambda: planning.measure(MODEL, specjax.Spectra(window=2, guesses=2), PROMPTS),
            "chains, neither trees nor what pays .Auto., got Spectra",
        ),
    ],
)
def test_one_sentence_for_bad_input(make, message: str, wrong_types: None) -> None:
    with pytest.raises(ValueError, match=message):
        make()


CASTS = {
    "int4": ("rtn", {"group_size": 32}), "int8": ("int8", {"group_size": None}),
    "mxfp4": ("mxfp4", {}),
}  # fmt: skip
CONFIGS = {
    "untied": CONFIG,
    "tied, 16 bits, biases": dataclasses.replace(
        CONFIG, tie_word_embeddings=True, dtype="bfloat16", qkv_bias=True, qk_norm=True
    ),
}


def _model(config: specjax.ModelConfig) -> Params:
    """With every weight that the configuration asks for."""
    params, dtype = random_model(config), jnp.dtype(config.dtype)

    def biased(linear: Linear) -> Linear:
        return Linear(linear.weight, jnp.zeros(linear.weight.shape[0], dtype))

    if config.qkv_bias:
        norm = jnp.ones(config.head_dim, dtype)
        layers = tuple(
            dataclasses.replace(
                layer, q=biased(layer.q), k=biased(layer.k), v=biased(layer.v),
                q_norm=norm, k_norm=norm,
            )
            for layer in params.layers
        )  # fmt: skip
        params = dataclasses.replace(params, layers=layers)
    return dataclasses.replace(params, lm_head=None) if config.tie_word_embeddings else params


@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_weight_bytes_are_those_of_real_weights(name: str, lm_head: bool) -> None:
    config = CONFIGS[name]
    target = _model(config)
    assert planning.weight_bytes(config) == target.nbytes
    for weights, (method, options) in CASTS.items():
        cast = stored(quantize(target, method, lm_head=lm_head, **options))
        expected = planning.weight_bytes(config, weights, lm_head=lm_head, **options)
        assert expected == cast.nbytes
        shared = {id(leaf) for leaf in jax.tree.leaves(target)}
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(cast) if id(leaf) not in shared)
        memory = planning.plan_memory(config, draft=weights, lm_head=lm_head, **options)
        assert (memory.target, memory.draft) == (target.nbytes, own)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_cache_bytes_are_those_of_a_real_cache(config: specjax.ModelConfig, bits: int) -> None:
    cache = KVCache.create(config, 3, 200, bits)
    real = sum(leaf.nbytes for leaf in jax.tree.leaves((cache.keys, cache.values)))
    assert planning.cache_bytes(config, 3, 200, bits) == real
    shared = planning.plan_memory(config, draft="int4", share_cache=True, rows=3, cache_bits=bits)
    apart = planning.plan_memory(config, draft="int4", rows=3, cache_bits=bits)
    assert shared.draft_cache == 0 and apart.draft_cache == apart.target_cache
    assert apart.total - shared.total == apart.draft_cache


def test_most_that_fits() -> None:
    for device in (0, 5, 10, 11, 39, 40, 1000):
        expected = max(n for n in range(9) if 10 + 5 * n <= device or n == 0)
        assert most_that_fits(device, lambda n: 10 + 5 * n, 8) == expected


# A layer that adds nothing can go without a change; the search finds it first.
def test_search_finds_the_layer_that_does_nothing() -> None:
    layers = list(MODEL.layers)
    nothing = {
        name: Linear(jnp.zeros_like(getattr(layers[2], name).weight)) for name in ("o", "down")
    }
    layers[2] = dataclasses.replace(layers[2], **nothing)
    params = dataclasses.replace(MODEL, layers=tuple(layers))
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 24))
    calls: list[tuple[int, int]] = []
    found = planning.search_layers(params, tokens, progress=lambda *each: calls.append(each))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    by_size = {len(each.layers): each for each in found}
    assert by_size[3].layers == (0, 1, 3) and by_size[3].acceptance == 1
    assert [each.speedup for each in found] == sorted((e.speedup for e in found), reverse=True)
    for each in found:
        cost = planning.best_draft_lengths(Level(each.acceptance), each.cost)[0]
        assert cost.draft_length == each.draft_length
    # Its acceptance is that of the skipping model as `forward` runs it.
    pair = by_size[2]
    positions = jnp.broadcast_to(jnp.arange(24), (2, 24))
    cache = KVCache.create(params.config, 2, 24)
    choices = [
        np.argmax(forward(params, jnp.asarray(tokens), positions, cache, layers=each)[0], axis=-1)
        for each in (None, pair.layers)
    ]
    assert pair.acceptance == pytest.approx((choices[0] == choices[1]).mean())


@pytest.mark.exhaustive
def test_measure_counts_what_decoding_counts() -> None:
    """A draft equal to the target is always kept, on both levels. Times are not looked at."""
    drafter = specjax.MultiLevel(
        specjax.DraftModel(MODEL, 3, schedule=specjax.Heuristic()),
        specjax.LayerSkip((0, 1, 2, 3), 1),
    )
    found = planning.measure(MODEL, drafter, PROMPTS, max_new_tokens=12, turns=1)
    assert found.tokens_per_round == 4
    assert [level.acceptance for level in found.levels] == [1, 1]
    assert [level.draft_length for level in found.levels] == [3, 1]
    assert [len(level.measured) for level in found.levels] == [4, 2]
    assert found.levels[0].verification(0) == 1 and found.seconds > 0
    assert found.speedup == planning.speedup(found.levels, found.draft_cost)
    schedule = found.adaptive()
    assert schedule.row_cost == found.levels[0].row_cost and schedule.draft_cost > 0


@pytest.mark.exhaustive
def test_measure_takes_acceptance_from_all_prompts() -> None:
    """Decoded one at a time they fare as they do together, since no row knows of its neighbours."""
    drafter = specjax.LayerSkip((0, 2, 3), 2)
    found = planning.measure(MODEL, drafter, PROMPTS, rows=1, max_new_tokens=12, turns=1)
    stats = specjax.decode(MODEL, PROMPTS, drafter=drafter, max_new_tokens=12, stop_tokens=()).stats
    assert 0 < found.levels[0].acceptance < 1
    assert found.levels[0].acceptance == pytest.approx(float(stats.token_acceptance))
    assert found.tokens_per_round == pytest.approx(float(stats.tokens_per_round))
