"""Kinds of rounds: a round computes no more than some running prompt asks for.

Each kind has programs of its own, so there are few, and each gives what the ones before it give.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from typing import Any

import jax

from specjax.generation.ahead import Ahead
from specjax.generation.guided import compile_ahead
from specjax.generation.request import Request
from specjax.model.params import Params
from specjax.speculation.state import DecodeState


class Kind(IntEnum):
    """Rounds of rows that are all greedy; that draw; that also have log-probabilities; and that
    also have penalties."""

    GREEDY = 0
    DRAWN = 1
    SCORED = 2
    PENALIZED = 3


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


class GuidedPrograms:
    """The programs of rounds with grammars, of the kinds that have been compiled ahead of them."""

    def __init__(self) -> None:
        self.ahead = Ahead()
        self._kinds = frozenset[Kind]()

    @property
    def ready(self) -> bool:
        """Whether there are programs that serve every prompt."""
        return Kind.PENALIZED in self._kinds

    def least(self, kind: Kind) -> Kind:
        """The least compiled kind that serves prompts of this one; this one, if none does."""
        return min((each for each in self._kinds if each >= kind), default=kind)

    def compile(self, params: Params, request: Request, state: DecodeState, kind: Kind) -> None:
        """Compiles the programs of a kind. state: its shapes, from `shapes_of`."""
        state = dataclasses.replace(state, **less_of(state, kind))
        compile_ahead(self.ahead, params, request, state)
        self._kinds |= {kind}


def shapes_of(state: DecodeState) -> DecodeState:
    """The same with a `jax.ShapeDtypeStruct` in the place of each array."""
    shapes: DecodeState = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state
    )
    return shapes
