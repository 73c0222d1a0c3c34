"""Drafts from what the target thought likely after each token before (Token Recycling, Luo et al.
2024, section 3).

Every pass gives the most probable next tokens at all of its places, and most of them are thrown
away. A matrix keeps them: the last time that a token was read, by whatever path, its most probable
successors. A round proposes a tree of one shape: successors of the last token, their successors,
and so on. The matrix costs 4 · V · `successors` bytes per row and begins with what followed each
token in the prompt; the paper keeps it from one request to the next.
"""

from __future__ import annotations

import dataclasses
import heapq
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.checks import check_integer
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal, Verified

_MOST_NODES = 1024
_NOTHING = -1  # where a successor is not known


class RecycledState(NamedTuple):
    """The successors that each row's passes gave.

    matrix: int32[B, V, C], the most probable successors of every token; -1: not known.
    read: int32[B, 1 + N], the tokens that this round's pass reads; V: none.
    """

    matrix: jax.Array
    read: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRecycling(Drafter):
    """Proposes a tree of tokens that were probable after the ones before them.

    nodes: tokens per proposal (the paper: 80; fewer where wide passes are dear).
    successors: C, tokens that are kept for each token (the paper: 8).

    Raises ValueError where a field is out of its range.
    """

    nodes: int = jax.tree.static(default=80)
    successors: int = jax.tree.static(default=8)

    def __post_init__(self) -> None:
        for name, most in (("nodes", _MOST_NODES), ("successors", 64)):
            if not 1 <= check_integer(name, getattr(self, name)) <= most:
                raise ValueError(f"{name} must be in 1 … {most}, got {getattr(self, name)}")

    @property
    def draft_length(self) -> int:
        return self.nodes

    def validate(self, params: Params, positions: int) -> None:
        if self.successors > params.config.vocab_size:
            raise ValueError(
                f"successors must be at most the vocabulary's {params.config.vocab_size} entries, "
                f"got {self.successors}"
            )

    def init(self, params: Params, state: DecodeState, width: int) -> RecycledState:
        rows = state.tokens.shape[0]
        matrix = jnp.full((rows, state.vocab_size, self.successors), _NOTHING, jnp.int32)
        tokens, follow = state.tokens[:, : width - 1], state.tokens[:, 1:width]
        meant = jnp.arange(1, width) < state.lengths[:, None]
        tokens = jnp.where(meant, tokens, state.vocab_size)
        matrix = matrix.at[jnp.arange(rows)[:, None], tokens, 0].set(follow, mode="drop")
        return RecycledState(matrix, jnp.full((rows, 1 + self.nodes), state.vocab_size, jnp.int32))

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        parents, ranks, depths = tree_shape(self.nodes, self.successors)
        rows = jnp.arange(state.tokens.shape[0])[:, None]
        matrix = state.draft.matrix
        tokens = jnp.full((rows.shape[0], 1 + self.nodes), _NOTHING, jnp.int32)
        tokens = tokens.at[:, 0].set(state.last_tokens)
        for depth in range(1, depths.max() + 1):
            (chosen,) = np.nonzero(depths == depth)
            before = tokens[:, 1 + parents[chosen]]
            found = matrix[rows, jnp.maximum(before, 0), ranks[chosen]]
            tokens = tokens.at[:, 1 + chosen].set(jnp.where(before < 0, _NOTHING, found))
        known, proposed = tokens[:, 1:] >= 0, jnp.maximum(tokens[:, 1:], 0)
        draft = RecycledState(matrix, jnp.where(tokens < 0, state.vocab_size, tokens))
        above = jnp.broadcast_to(jnp.asarray(parents), proposed.shape)
        counts = jnp.where(jnp.any(known, axis=1), self.nodes, 0)
        proposal = Proposal(proposed, counts, parents=above, verifiable=known)
        return proposal, dataclasses.replace(state, draft=draft)

    def observe(self, draft: RecycledState, verified: Verified) -> RecycledState:
        likely = lax.top_k(verified.logits, self.successors)[1].astype(jnp.int32)
        rows = jnp.arange(draft.read.shape[0])[:, None]
        return draft._replace(matrix=draft.matrix.at[rows, draft.read].set(likely, mode="drop"))


@cache
def tree_shape(nodes: int, successors: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parents, the ranks among their siblings and the depths of a tree's nodes, int32[N] each.

    They are the nodes that are kept most often if the successor of rank r = 0, 1, … is right with a
    chance of 1 / (r + 2)^1.5: one long branch, and ever shorter ones beside it.
    """
    chance = np.arange(2, successors + 2) ** -1.5
    waiting = [(-chance[0], 0, -1, 0, 1)]  # chance, a number that breaks ties, parent, rank, depth
    found: list[tuple[int, int, int]] = []
    number = 1
    while len(found) < nodes:
        value, _, parent, rank, depth = heapq.heappop(waiting)
        found.append((parent, rank, depth))
        if rank + 1 < successors:
            ratio = chance[rank + 1] / chance[rank]
            heapq.heappush(waiting, (value * ratio, number, parent, rank + 1, depth))
        heapq.heappush(waiting, (value * chance[0], number + 1, len(found) - 1, 0, depth + 1))
        number += 2
    parents, ranks, depths = np.array(found, np.int32).T
    return parents, ranks, depths
