"""Parts of a set: its first items, or a sample that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def sample(items: Sequence[T], limit: int | None, seed: int | None = None) -> list[T]:
    """Takes at most `limit` items, in their order.

    Args:
      items: the set.
      limit: the most items; None: all.
      seed: decides a sample without repetition; None: the first items.

    Returns:
      The items.
    """
    if limit is None or limit >= len(items):
        return list(items)
    if seed is None:
        return list(items[:limit])
    chosen = sorted(random.Random(seed).sample(range(len(items)), limit))
    return [items[place] for place in chosen]
