"""Drafts looked up in a corpus (REST, He et al. 2024, section 3; SPECTRA-RETRIEVAL).

The drafter searches the datastore for the longest run of a row's last tokens that occurs there. The
tokens after each occurrence are a candidate. The prefixes that most candidates share become the
nodes of a token tree.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from specjax.checks import check_integer
from specjax.drafting.datastore import ORDERED, Datastore
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Retrieval(Drafter):
    """Proposes the tokens that followed the same words in a corpus.

    datastore: made by `specjax datastore build`. SPECTRA keeps the texts with the target's lowest
        perplexity.
    nodes: the most tokens per proposal (REST: 64).
    depth: the most tokens in a row (REST: 10).
    longest, shortest: tokens of the run to search for (REST: 16 and 2).
    candidates: occurrences to examine, spread evenly over all.

    Raises ValueError where a field is out of its range.
    """

    datastore: Datastore = dataclasses.field(repr=False)
    nodes: int = jax.tree.static(default=64)
    depth: int = jax.tree.static(default=10)
    longest: int = jax.tree.static(default=ORDERED)
    shortest: int = jax.tree.static(default=2)
    candidates: int = jax.tree.static(default=64)

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "shortest", "candidates"):
            if check_integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.shortest <= check_integer("longest", self.longest) <= ORDERED:
            raise ValueError(
                f"longest must be in shortest={self.shortest} … {ORDERED}, got {self.longest}"
            )

    @property
    def draft_length(self) -> int:
        return self.nodes

    def validate(self, params: Params, positions: int) -> None:
        if not isinstance(self.datastore, Datastore):
            raise ValueError(
                "datastore must be what specjax.Datastore.load returns, "
                f"got {type(self.datastore).__name__}"
            )
        if self.datastore.vocab_size != params.config.vocab_size:
            raise ValueError(
                f"the datastore was made for a vocabulary of {self.datastore.vocab_size} entries; "
                f"the model has {params.config.vocab_size}"
            )

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        tokens, parents, counts = best_nodes(*self.continuations(state), self.nodes)
        return Proposal(tokens, counts, parents=parents), state

    def continuations(
        self, state: DecodeState
    ) -> tuple[Int32[Array, "B C L"], Int32[Array, "B C"]]:
        """Returns the continuations in the corpus, int32[B, C, L], and their lengths, int32[B,
        C]."""
        store = self.datastore
        first, count, length = self._longest_run(state)
        chosen = jnp.arange(self.candidates)
        spread = jnp.where(
            count > self.candidates, chosen * (count / self.candidates), chosen
        ).astype(jnp.int32)
        places = jnp.minimum(first + spread, store.suffixes.shape[0] - 1)
        tokens, valid = store.read(store.suffixes[places] + length, self.depth)
        return tokens, jnp.where(chosen < count, valid, 0)

    def _longest_run(self, state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds the longest end of each row that occurs: place, count and length, int32[B, 1]
        each."""
        lengths = jnp.arange(self.longest, self.shortest - 1, -1)
        starts = state.lengths[:, None] - lengths
        index = jnp.maximum(starts, 0)[..., None] + jnp.arange(self.longest)
        index = jnp.minimum(index, state.tokens.shape[1] - 1)
        queries = jax.vmap(lambda row, places: row[places])(state.tokens, index)
        first, count = self.datastore.find(queries, jnp.broadcast_to(lengths, starts.shape))
        count = jnp.where(starts >= 0, count, 0)
        best = jnp.argmax(count > 0, axis=1)[:, None]
        first, count = (jnp.take_along_axis(x, best, axis=1) for x in (first, count))
        return first, count, lengths[best]


def best_nodes(
    sequences: Int32[Array, "B C L"], lengths: Int32[Array, "B C"], nodes: int
) -> tuple[Int32[Array, "B {nodes}"], Int32[Array, "B {nodes}"], Int32[Array, " B"]]:
    """Builds a token tree of the prefixes that most sequences share (REST, section 3.2).

    Args:
      sequences: int32[B, C, L], and lengths: int32[B, C], valid tokens of each.
      nodes: the most nodes, N.

    Returns:
      tokens: int32[B, N], parents: int32[B, N] and counts: int32[B], as in a `Proposal`. Nodes
      are ordered by falling number of sequences, then by depth, so that parents come first.
    """
    b, c, depth = sequences.shape
    valid = jnp.arange(depth) < lengths[..., None]
    differ = sequences[:, :, None] != sequences[:, None]
    shared = (jnp.cumsum(differ, axis=3) == 0) & valid[:, None] & valid[:, :, None]
    first = jnp.argmax(shared, axis=2)  # [B, C, L]: the first sequence with this prefix
    is_node = valid & (first == jnp.arange(c)[:, None])
    rank = (c - jnp.sum(shared, axis=2)) * depth + jnp.arange(depth)  # rises towards the leaves
    rank = jnp.where(is_node, rank, (c + 1) * depth).reshape(b, -1)
    order = jnp.argsort(rank, axis=1, stable=True)
    numbers = jnp.argsort(order, axis=1).astype(jnp.int32).reshape(b, c, depth)
    own = jnp.take_along_axis(numbers, first, axis=1)
    parents = jnp.pad(own[:, :, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    counts = jnp.minimum(jnp.sum(is_node, axis=(1, 2), dtype=jnp.int32), nodes)
    order = jnp.pad(order, ((0, 0), (0, max(nodes - c * depth, 0))))[:, :nodes]
    meant = jnp.arange(nodes) < counts[:, None]
    tokens, parents = (
        jnp.take_along_axis(x.reshape(b, -1), order, axis=1) for x in (sequences, parents)
    )
    return jnp.where(meant, tokens, 0), jnp.where(meant, parents, -1), counts
