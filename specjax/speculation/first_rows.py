"""Rounds of a state's first rows: the other ones are free, and a pass over fewer rows costs less.

The caches stay whole, and passes read and write the entries of the first rows where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Int32

from pallas_kernels.settings import own_settings
from specjax.model.kv_cache import KVCache
from specjax.speculation.state import DecodeState


def first_rows(state: DecodeState, rows: int | None) -> DecodeState:
    """Returns the state of the first rows. rows: their number; None: all."""
    if rows in (None, len(state.finished)):
        return state

    def cut(whole: Any) -> Any:
        return whole.first(rows) if isinstance(whole, KVCache) else whole[:rows]

    return of_rows(cut, state)


def put_first_rows(state: DecodeState, part: DecodeState) -> DecodeState:
    """Returns the state whose first rows are those of `part`, which `first_rows` has cut out."""
    rows = len(part.finished)
    if rows == len(state.finished):
        return part

    def put(whole: Any, own: Any) -> Any:
        if isinstance(whole, KVCache):
            return whole.put_first(own)
        return whole.at[:rows].set(own)

    return dataclasses.replace(of_rows(put, state, part), shared=part.shared)


@partial(jax.jit, donate_argnames="state")
@own_settings()
def move_row(state: DecodeState, source: Int32[Array, ""], target: Int32[Array, ""]) -> DecodeState:
    """Returns the state with one row in another one's place, which was free, as its own is now.

    The given state is donated. source, target: int32[].
    """

    def move(whole: Any) -> Any:
        if isinstance(whole, KVCache):
            return whole.move_row(source, target)
        return whole.at[target].set(whole[source])

    moved = of_rows(move, state)
    return dataclasses.replace(moved, finished=moved.finished.at[source].set(True))


def of_rows(change: Callable[..., Any], *states: DecodeState) -> DecodeState:
    """Changes all that has rows: arrays, rows first, and caches. The rest is the first state's."""
    changed: DecodeState = jax.tree.map(
        change,
        *(dataclasses.replace(state, shared=None) for state in states),
        is_leaf=lambda node: isinstance(node, KVCache),
    )
    return dataclasses.replace(changed, shared=states[0].shared)
