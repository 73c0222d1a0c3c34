"""Which drafters a drafter is made of."""

from __future__ import annotations

from specjax import Drafter


def types_of(drafter: Drafter) -> set[type[Drafter]]:
    """The types of a drafter and of those inside it."""
    return {type(drafter)}.union(*(types_of(getattr(drafter, name)) for name in drafter.inside))
