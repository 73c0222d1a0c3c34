"""Chooses few cases of a large parametrization that cover much of it: a covering array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

Case = Mapping[str, int]  # the number of the value that each parameter has


def covering(cases: Sequence[Case], strength: int) -> list[int]:
    """Greedily chooses cases until every combination of `strength` values that occurs is in one.

    Args:
        cases: Every case; all name the same parameters.
        strength: 1 for every value of every parameter, 2 for every pair of values, and so on.

    Returns:
        The numbers of the chosen cases, ascending. The same cases give the same choice.
    """
    parts = [frozenset(combinations(sorted(case.items()), strength)) for case in cases]
    missing = set().union(*parts)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(parts[number] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)
