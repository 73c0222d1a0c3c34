"""Two sources of guesses under one budget: all of SPECTRA is CORE, then RETRIEVAL.

The first source gets all the room it asks for: the model's own guesses are accepted more often
than a corpus's (Le et al. 2025, section 4.2.2 and figure 3).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_integer
from specjax.drafting.ngram import NGram
from specjax.drafting.prompt_lookup import PromptLookup
from specjax.drafting.retrieval import Retrieval
from specjax.drafting.window import WindowDrafter
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal, Verified

_TEXT_ALONE = (NGram, PromptLookup, Retrieval)


class CombinedState(NamedTuple):
    """The two drafters' own states."""

    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Combined(Drafter):
    """Proposes the tokens of `first`, then those of `second` while there is room.

    A token that both propose after the same path appears once. The whole of SPECTRA is
    `Combined(Spectra(), Retrieval(datastore))`.

    first: a drafter without a model: Lookahead, Spectra, NGram, PromptLookup, Retrieval, Combined.
    second: a drafter that looks only at the text: NGram, PromptLookup or Retrieval.
    extra: tokens that a proposal may have beyond `first.draft_length`.

    Raises ValueError if a field is something else.
    """

    first: Drafter
    second: Drafter
    extra: int = jax.tree.static(default=0)

    inside = ("first", "second")

    def __post_init__(self) -> None:
        if check_integer("extra", self.extra) < 0:
            raise ValueError(f"extra must be at least 0, got {self.extra}")
        kinds = (*_TEXT_ALONE, WindowDrafter, Combined)
        _check_kind("first", self.first, kinds, "a drafter without a model")
        _check_kind("second", self.second, _TEXT_ALONE, "NGram, PromptLookup or Retrieval")

    @property
    def draft_length(self) -> int:
        return self.first.draft_length + self.extra

    def validate(self, params: Params, positions: int) -> None:
        self.first.validate(params, positions)
        self.second.validate(params, positions)

    def init(self, params: Params, state: DecodeState, width: int) -> CombinedState:
        return CombinedState(
            self.first.init(params, state, width), self.second.init(params, state, width)
        )

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        draft: CombinedState = state.draft
        before = dataclasses.replace(state, draft=draft.first)
        first, after_first = self.first.propose(params, before)
        before = dataclasses.replace(state, draft=draft.second)
        second, after_second = self.second.propose(params, before)
        draft = CombinedState(after_first.draft, after_second.draft)
        return merge(first, second, self.draft_length), dataclasses.replace(state, draft=draft)

    def observe(self, draft: CombinedState, verified: Verified) -> CombinedState:
        # The first drafter's tokens come first, where it looks for them; the second looks at none.
        return CombinedState(
            self.first.observe(draft.first, verified), self.second.observe(draft.second, verified)
        )


def merge(first: Proposal, second: Proposal, nodes: int) -> Proposal:
    """Merges two proposals into one tree of at most N = `nodes` tokens, the first proposal's first.

    Tokens of both must have been chosen deterministically. `nodes` must hold all of the first.
    """
    length = first.tokens.shape[1]
    tokens, parents, meant = _tree(first)
    may_match = meant if first.verifiable is None else meant & first.verifiable
    more, more_parents, more_meant = _tree(second)
    rows = jnp.arange(tokens.shape[0])

    def match(i: jax.Array, matches: jax.Array) -> jax.Array:
        """Returns the place of the second proposal's token i in the first, or -1."""
        parent = more_parents[:, i]
        below = jnp.where(parent < 0, -1, matches[rows, parent])
        same = may_match & (tokens == more[:, i, None]) & (parents == below[:, None])
        same &= ((parent < 0) | (below >= 0))[:, None]
        return matches.at[:, i].set(jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), -1))

    matches = lax.fori_loop(0, more.shape[1], match, jnp.full_like(more, -1))
    new = more_meant & (matches < 0)
    count = jnp.sum(meant, axis=1, dtype=jnp.int32)
    places = count[:, None] + jnp.cumsum(new, axis=1, dtype=jnp.int32) - 1
    own = jnp.where(matches >= 0, matches, places)
    moved = jnp.take_along_axis(own, jnp.maximum(more_parents, 0), axis=1)
    moved = jnp.where(more_parents < 0, -1, moved)
    slots = rows[:, None], jnp.where(new, places, nodes)
    pad = ((0, 0), (0, nodes - length))
    verifiable = first.verifiable
    if verifiable is not None:
        verifiable = jnp.pad(verifiable, pad).at[slots].set(True, mode="drop")
    return Proposal(
        tokens=jnp.pad(tokens, pad).at[slots].set(more, mode="drop"),
        counts=jnp.minimum(count + jnp.sum(new, axis=1, dtype=jnp.int32), nodes),
        parents=jnp.pad(parents, pad, constant_values=-1).at[slots].set(moved, mode="drop"),
        verifiable=verifiable,
        least=first.least,
    )


def _tree(proposal: Proposal) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, parents and which tokens count, [B, N] each, of a chain or a tree."""
    tokens, parents = proposal.tokens, proposal.parents
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    if parents is None:
        parents = jnp.broadcast_to(place - 1, tokens.shape)
    assert proposal.counts is not None
    return tokens, parents, place < proposal.counts[:, None]


def _check_kind(name: str, drafter: Any, kinds: tuple[type, ...], accepted: str) -> None:
    # JAX passes placeholders here while it unflattens the tree; skip them.
    if isinstance(drafter, Drafter) and not isinstance(drafter, kinds):
        raise ValueError(f"{name} of a Combined must be {accepted}, got {drafter!r}")
