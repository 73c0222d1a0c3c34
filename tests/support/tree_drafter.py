"""A test drafter of token trees: a draft model's most probable continuations."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.sampling import draw, probabilities, uniform_pairs
from specjax.speculation.state import DecodeState, Proposal
from specjax.speculation.verification import score


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeDrafter(Drafter):
    """Every node of depth d has branches[d] children, the most probable one last.

    params: a draft model made of the target's weights. It reads and overwrites the target's cache.
    varied: whether proposals have from none to all of their nodes.
    aside: whether some nodes are not verifiable.
    drawn: whether children are independent draws when sampling.
    """

    params: Params = dataclasses.field(repr=False)
    branches: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    varied: bool = dataclasses.field(default=False, metadata={"static": True})
    aside: bool = dataclasses.field(default=False, metadata={"static": True})
    drawn: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def draft_length(self) -> int:
        return sum(math.prod(self.branches[: depth + 1]) for depth in range(len(self.branches)))

    @property
    def parents(self) -> tuple[int, ...]:
        parents, leaves = [], range(-1, 0)
        for branches in self.branches:
            first = len(parents)
            parents += [leaf for leaf in leaves for _ in range(branches)]
            leaves = range(first, len(parents))
        return tuple(parents)

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        rows, n = state.tokens.shape[0], self.draft_length
        parents = jnp.broadcast_to(jnp.array(self.parents, jnp.int32), (rows, n))
        tokens = jnp.zeros((rows, 0), jnp.int32)
        distributions = []
        leaves = range(-1, 0)
        for branches in self.branches:
            first = tokens.shape[1]
            known = parents[:, :first] if first else None
            logits, cache = score(self.params, state, tokens, "a16", None, known)
            state = dataclasses.replace(state, cache=cache)
            logits = logits[:, leaves.start + 1 : leaves.stop + 1]
            if self.drawn and state.sampling is not None:
                p = jnp.repeat(probabilities(logits, state.sampling), branches, axis=1)
                children = _draw(state, p, first)
                distributions.append(p)
            else:
                children = lax.top_k(logits, branches)[1][..., ::-1].reshape(rows, -1)
            tokens = jnp.concatenate((tokens, children.astype(jnp.int32)), axis=1)
            leaves = range(first, tokens.shape[1])
        counts = (state.lengths * 5 + jnp.arange(rows)) % (n + 1) if self.varied else None
        verifiable = jnp.broadcast_to(jnp.arange(n) % 5 != 0, (rows, n)) if self.aside else None
        q = jnp.concatenate(distributions, axis=1) if distributions else None
        return Proposal(tokens, counts, q, parents, verifiable), state


def _draw(state: DecodeState, p: jax.Array, first: int) -> jax.Array:
    """One token from each of a row's distributions. f32[B, C, V] -> int32[B, C]."""
    fold = jax.vmap(jax.random.fold_in, (0, None))
    keys = state.round_keys(purpose=0)
    return jnp.stack(
        [draw(uniform_pairs(fold(keys, first + i)), p[:, i]) for i in range(p.shape[1])], axis=1
    )
