"""Draws the target's own tokens along a proposal, from the last token on, while it has them.

Drafts that were chosen without chance need no more: a token is drawn where a row has arrived, and
the row goes on to the draft that is this token. So a round draws as many tokens as it gains, not
one behind every draft.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

from specjax.speculation.penalties import Earlier
from specjax.speculation.sampling import draw, probabilities, uniform_pairs
from specjax.speculation.state import DecodeState, Proposal


class Walk(NamedTuple):
    """How far every row has come.

    depth: int32[], tokens drawn in each row that is still on its way.
    going: bool[B], whether the row's last token was a draft.
    node: int32[B], the number of that draft, -1 at the last token before the round.
    emitted: int32[B, N + 1], the tokens drawn, then zeros.
    nodes: int32[B, N + 1], the numbers of the drafts that they were, then -1.
    earlier: the tokens that penalties ask for before the row's next place, [B, V].
    distributions: f32[B, N + 1, V], what each token was drawn from, for a level that drafts; None
        for the target, which nobody asks.
    """

    depth: jax.Array
    going: jax.Array
    node: jax.Array
    emitted: jax.Array
    nodes: jax.Array
    earlier: Earlier
    distributions: jax.Array | None

    @property
    def accepted(self) -> jax.Array:
        """Drafts that each row has kept, int32[B]."""
        return jnp.sum(self.nodes >= 0, axis=1, dtype=jnp.int32)


def walk(
    state: DecodeState,
    proposal: Proposal,
    meant: Bool[Array, "B N"],
    logits: Float32[Array, "B N+1 V"],
) -> Walk:
    """Draws from the target's distributions until no row's token is one of its drafts.

    A draw depends only on the row's key and the token's place in the text, so such drafts change
    no output.

    Args:
      state: its sampling is given.
      proposal: a chain or a tree.
      meant: the drafts that count.
      logits: the target's after the last token and after every draft.

    Returns:
      The end of the walk.
    """
    sampling = state.sampling
    assert sampling is not None
    rows, places, _ = logits.shape
    parents = proposal.parents
    if parents is None:
        parents = jnp.broadcast_to(jnp.arange(places - 1) - 1, (rows, places - 1))
    each, numbers = jnp.arange(rows), jnp.arange(places - 1)

    def step(at: Walk) -> Walk:
        here = probabilities(logits[each, at.node + 1], sampling, at.earlier)
        keys = state.place_keys(jnp.broadcast_to(at.depth, (rows, 1)))[:, 0]
        token = jnp.where(at.going, draw(uniform_pairs(keys), here), 0)
        found = meant & (parents == at.node[:, None]) & (proposal.tokens == token[:, None])
        going = at.going & jnp.any(found, axis=1)
        first = jnp.min(jnp.where(found, numbers, places), axis=1, initial=places)
        node = jnp.where(going, first, at.node)
        distributions = at.distributions
        if distributions is not None:
            distributions = distributions.at[:, at.depth].set(here)
        return Walk(
            at.depth + 1, going, node, at.emitted.at[:, at.depth].set(token),
            at.nodes.at[:, at.depth].set(jnp.where(going, node, -1)),
            at.earlier.and_then(token), distributions,
        )  # fmt: skip

    start = Walk(
        depth=jnp.int32(0),
        going=~state.finished,
        node=jnp.full(rows, -1, jnp.int32),
        emitted=jnp.zeros((rows, places), jnp.int32),
        nodes=jnp.full((rows, places), -1, jnp.int32),
        earlier=state.earlier(proposal.tokens[:, :0]).at(0),
        distributions=jnp.zeros_like(logits) if state.depth else None,
    )
    if places == 1:
        return step(start)
    end: Walk = lax.while_loop(lambda at: jnp.any(at.going), step, start)
    return end
