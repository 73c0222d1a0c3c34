"""A drafter's runs beside plain decoding's of the same prompts, as one row of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

import specjax
from specjax.bench.turns import geometric_mean


class Run(Protocol):
    """One output, the seconds that it took, and its counts."""

    @property
    def seconds(self) -> float: ...

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def stats(self) -> specjax.Stats: ...


def beside(own: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Speed-up with its 95 % interval, rates, and whether all outputs are the same."""
    ratios = [slow.seconds / fast.seconds for slow, fast in zip(plain, own, strict=True)]
    speedup = geometric_mean(ratios)
    counts = {
        count: sum(int(np.sum(getattr(run.stats, count))) for run in own)
        for count in ("generated", "rounds", "drafted", "accepted")
    }
    same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(own, plain, strict=True)]
    return {
        "speedup": speedup.mean, "speedup_low": speedup.low, "speedup_high": speedup.high,
        "tokens_per_second": counts["generated"] / sum(run.seconds for run in own),
        "tokens_per_round": counts["generated"] / counts["rounds"],
        "kept": counts["accepted"] / max(counts["drafted"], 1),
        "identical": all(same),
    }  # fmt: skip
