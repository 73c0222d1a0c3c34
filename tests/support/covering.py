"""Chooses a few cases of many for `make test`. `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations

import pytest


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int) -> list[int]:
    """Greedily chooses cases that cover every combination of `strength` values that occurs.

    Args:
        cases: The value of each parameter in every case. All cases have the same parameters.
        strength: 1 for every value of every parameter, 2 for every pair of values, and so on.

    Returns:
        The indices of the chosen cases, ascending. The choice is deterministic.
    """
    parts = [frozenset(combinations(sorted(case.items()), strength)) for case in cases]
    missing = set().union(*parts)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(parts[number] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


def representatives(cases: Iterable[object], *chosen: object) -> list[object]:
    """The cases as pytest parameters. Cases that are not chosen are marked exhaustive."""
    cases = list(cases)
    if unknown := [each for each in chosen if each not in cases]:
        raise ValueError(f"these are not among the cases: {unknown}")
    return [each if each in chosen else left_out(each) for each in cases]


def left_out(case: object) -> object:
    """One case that only `make test-all` runs. A tuple holds the values of several parameters."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)
