"""Which drafters a drafter is made of."""

from __future__ import annotations

from specjax import Drafter

INSIDE = ("draft", "first", "second", "outer", "inner")


def types_of(drafter: Drafter) -> set[type[Drafter]]:
    """The types of a drafter and of those inside it."""
    inside = (getattr(drafter, name, None) for name in INSIDE)
    return {type(drafter)}.union(*(types_of(each) for each in inside if isinstance(each, Drafter)))
