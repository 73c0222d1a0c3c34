"""Kinds of rounds: a round computes no more than some running prompt asks for.

A kind gives all that the kinds before it give.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from specjax.speculation.state import DecodeState


class Kind(IntEnum):
    """Rounds of rows that are all greedy; that draw; that also have log-probabilities; and that
    also have penalties."""

    GREEDY = 0
    DRAWN = 1
    SCORED = 2
    PENALIZED = 3


class Scope(NamedTuple):
    """All that a round computes. rows: how many rows run, the first ones; guided: whether some of
    them keep to grammars."""

    rows: int
    kind: Kind
    guided: bool = False

    def serves(self, other: Scope) -> bool:
        """Whether such a round gives what one of the other scope gives."""
        return self.guided == other.guided and self.rows >= other.rows and self.kind >= other.kind


def less_of(state: DecodeState, kind: Kind) -> dict[str, Any]:
    """The fields of the state that hold less than usual in a kind of rounds."""
    sampling = state.sampling
    if sampling is None or kind is Kind.PENALIZED:
        return {}
    if kind is Kind.SCORED:
        return {"sampling": sampling.without_penalties()}
    if kind is Kind.DRAWN:
        return {"sampling": sampling.without_penalties(), "logprobs": None}
    return {"sampling": None, "keys": None, "logprobs": None}
