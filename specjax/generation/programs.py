"""The programs of rounds. Each scope has its own; until one is compiled, a wider one serves."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from specjax.generation.ahead import Ahead
from specjax.generation.batch_rows import run_rounds
from specjax.generation.guided import compile_ahead
from specjax.generation.kinds import Scope, less_of
from specjax.generation.request import Request
from specjax.model.params import Params
from specjax.speculation.state import DecodeState


class Programs:
    """The programs of rounds that have been compiled ahead of them.

    room: the most rounds that the host is told of at a time.
    """

    def __init__(self, room: int = 0) -> None:
        self.ahead, self.room = Ahead(), room
        self._compiled = frozenset[Scope]()

    def have(self, scope: Scope) -> bool:
        """Whether the programs of a scope are compiled."""
        return scope in self._compiled

    def least(self, scope: Scope) -> Scope:
        """The least compiled scope that serves such a round; this one, if none does."""
        return min((each for each in self._compiled if each.serves(scope)), default=scope)

    def compile(self, params: Params, request: Request, state: DecodeState, scope: Scope) -> None:
        """Compiles the programs of a scope. state: its shapes, from `shapes_of`."""
        state = dataclasses.replace(state, **less_of(state, scope.kind))
        if scope.guided:
            compile_ahead(self.ahead, params, request, state, scope.rows)
        else:
            limit = jax.ShapeDtypeStruct((), np.int32)
            self.ahead.compile(
                run_rounds, params, request, state, limit, told=self.room, rows=scope.rows
            )
        self._compiled |= {scope}


def shapes_of(state: DecodeState) -> DecodeState:
    """The same with a `jax.ShapeDtypeStruct` in the place of each array."""
    shapes: DecodeState = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state
    )
    return shapes
