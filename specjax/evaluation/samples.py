"""Parts of a set: its first items, or a sample that a seed decides, of all kinds alike if asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def sample(
    items: Sequence[T],
    limit: int | None,
    seed: int | None = None,
    kind: Callable[[T], Hashable] | None = None,
) -> list[T]:
    """Takes at most `limit` items, in their order.

    Args:
      items: the set.
      limit: the most items; None: all.
      seed: decides a sample without repetition; None: the first items.
      kind: the kind of an item. As many of each kind are taken, as far as there are; None: kinds
        do not matter.

    Returns:
      The items.
    """
    if limit is None or limit >= len(items):
        return list(items)
    places: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(kind(item) if kind else None, []).append(place)
    counts = _shares([len(each) for each in places.values()], limit)
    chosen: list[int] = []
    draws = random.Random(seed)
    for some, count in zip(places.values(), counts, strict=True):
        chosen += some[:count] if seed is None else draws.sample(some, count)
    return [items[place] for place in sorted(chosen)]


def _shares(sizes: list[int], limit: int) -> list[int]:
    """`limit` dealt out one by one to groups that still have room."""
    shares = [0] * len(sizes)
    while limit > 0:
        for group, size in enumerate(sizes):
            if limit > 0 and shares[group] < size:
                shares[group] += 1
                limit -= 1
    return shares
