"""The intervals beside measured ratios hold what they promise."""

from __future__ import annotations

import numpy as np

from benchmarks.quality.acceptance import intervals


def _counts(rounds: np.ndarray, generated: np.ndarray) -> dict[str, np.ndarray]:
    nothing = np.zeros_like(rounds)
    return {
        "rounds": rounds, "generated": generated,
        "accepted": nothing, "drafted": nothing, "tested": nothing,
    }  # fmt: skip


def test_equal_prompts_leave_no_doubt() -> None:
    found = intervals(_counts(np.full(9, 10), np.full(9, 25)))
    names = ("tokens_per_round", "tokens_per_round_low", "tokens_per_round_high")
    assert [found[name] for name in names] == [2.5, 2.5, 2.5]
    assert found["kept"] == 0  # nothing was drafted


def test_the_ratio_is_one_of_sums() -> None:
    found = intervals(_counts(np.array([1, 99]), np.array([10, 99])))
    assert found["tokens_per_round"] == 109 / 100


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        rounds = random.integers(5, 20, 100)
        generated = random.poisson(2.0 * rounds)
        found = intervals(_counts(rounds, generated))
        covered += found["tokens_per_round_low"] <= 2.0 <= found["tokens_per_round_high"]
    assert 180 <= covered <= 199
