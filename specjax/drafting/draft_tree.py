"""A tree of what a drafting model thinks likely, grown where it is surest (EAGLE-2, Li et al. 2024,
section 4).

A node's value is the product of the drafting model's probabilities along its path: about the
chance that the target keeps it. Every pass of the model reads the `width` most valuable tokens of
the last level and adds the `width` most probable tokens after each. In the end the `nodes` most
valuable ones of all are proposed. A child is worth no more than its parent, and of equals the upper
level comes first, so what is kept is a tree whose parents come before their children.

EAGLE drafts with a head that is trained for one target. Here any model drafts that can draft a
chain: the target's own cheap reading, some of its layers, a cast, or a smaller model.

Where the entries lie: node i of those that a pass reads goes to slot state.lengths + i, and
attention follows the paths among them, as in a verification (`verification.score`). Attention can
name the tokens of its own pass, not scratch that an earlier pass left. So every pass reads the tree
again from the last token: 1 + (level - 1) · `width` tokens. The passes are few, and nothing new is
asked of the kernels, but each pass has a shape of its own to compile. In the target's cache these
slots are scratch, and the verification writes over them. A cache of the drafting model's own keeps
the entries up to the last token's, and the next round's first pass reads the accepted tokens in a
row, as EAGLE's head does.

Tokens are chosen without chance, so sampled drafts are compared with the target's own draws. The
probabilities are then those that `Sampling` leaves: a valuable node is one that is drawn often.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_integer, shown
from specjax.drafting.chain import LevelDrafter, LevelState
from specjax.drafting.qspec import QSpec
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.speculation import trees
from specjax.speculation.drafter import Drafter
from specjax.speculation.sampling import Sampling, probabilities
from specjax.speculation.state import DecodeState, Proposal
from specjax.speculation.verification import score

_MOST_CHILDREN, _MOST_NODES = 64, 1024
_SIX_PASSES = QSpec(6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree(Drafter):
    """Proposes the most probable continuations by a drafting model, as a tree that differs in every
    round.

    The defaults are the paper's, for GPUs. Wide passes are dear on CPUs: take a `width` of 2 or 3
    and fewer than 10 `nodes` there.

    draft: drafts with a model: QSpec, LayerSkip or DraftModel, without schedule and confidence. Its
        draft_length is the number of its passes, and the depth of the tree.
    width: tokens of a level that the model reads, and tokens that it adds after each.
    nodes: tokens per proposal, N.

    Raises ValueError where a field is out of its range, or `draft` is something else.
    """

    draft: LevelDrafter = _SIX_PASSES
    width: int = jax.tree.static(default=10)
    nodes: int = jax.tree.static(default=60)

    inside = ("draft",)

    def __post_init__(self) -> None:
        for name, most in (("width", _MOST_CHILDREN), ("nodes", _MOST_NODES)):
            if not 1 <= check_integer(name, getattr(self, name)) <= most:
                raise ValueError(f"{name} must be in 1 … {most}, got {getattr(self, name)}")
        draft = self.draft
        # JAX passes placeholders here while it unflattens the tree; skip them.
        if not isinstance(draft, Drafter):
            return
        chain = isinstance(draft, LevelDrafter)
        if not chain or draft.schedule is not None or draft.confidence is not None:
            raise ValueError(
                "draft of a DraftTree must draft with a model (QSpec, LayerSkip, DraftModel), "
                f"without schedule and confidence, got {shown(draft)}"
            )
        found = self.width + (draft.draft_length - 1) * self.width**2
        if self.nodes > found:
            raise ValueError(
                f"nodes must be at most {found}, all that draft_length={draft.draft_length} and "
                f"width={self.width} find, got {self.nodes}"
            )

    @property
    def draft_length(self) -> int:
        """The most slots that a round writes after the last token's: nodes read, or proposed."""
        return max(self.nodes, (self.draft.draft_length - 1) * self.width)

    @property
    def skippable(self) -> bool:
        return self.draft.skippable

    def validate(self, params: Params, positions: int) -> None:
        self.draft.validate(params, positions)
        if self.width > params.config.vocab_size:
            raise ValueError(
                f"width must be at most the vocabulary's {params.config.vocab_size} entries, "
                f"got {self.width}"
            )

    def init(self, params: Params, state: DecodeState, width: int) -> LevelState:
        return self.draft.init(params, state, width)

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        level = self.draft.enter(state.draft, state)
        if self.draft.own_cache:  # it lacks every token that the last round accepted
            level = dataclasses.replace(level, lag=level.lag + self.draft.draft_length - 1)
        found, cache = self._grow(self.draft.model(params), level)
        draft, cache = self.draft.leave(state.draft, state, cache, state.lengths)
        return _best(found, self.nodes), dataclasses.replace(state, cache=cache, draft=draft)

    def _grow(self, model: Params, level: DecodeState) -> tuple[_Nodes, KVCache]:
        """Every node that the passes find, and the cache with what these wrote."""
        drafter, width, rows = self.draft, self.width, level.tokens.shape[0]
        read = parents = jnp.zeros((rows, 0), jnp.int32)  # what the next pass reads, as a tree
        leaves = jnp.full((rows, 1), -1)  # the last nodes read, by their numbers among those found
        values = jnp.ones((rows, 1))  # of the leaves
        found = _Nodes(read, parents, jnp.zeros((rows, 0)))
        for _ in range(drafter.draft_length):
            logits, cache = score(
                model, level, read, drafter.activation, drafter.layers,
                parents if read.shape[1] else None,
            )  # fmt: skip
            # The cache has the last token's entry now, but every pass reads that token again.
            cache = cache.with_lengths(level.lengths - 1)
            level = dataclasses.replace(level, cache=cache, lag=0)
            count = leaves.shape[1]
            chances, tokens = lax.top_k(_chances(level, logits, read, parents, count), width)
            added = _Nodes(
                tokens.reshape(rows, -1).astype(jnp.int32),
                jnp.repeat(leaves, width, axis=1),
                (values[..., None] * chances).reshape(rows, -1),
            )
            values, chosen = lax.top_k(added.values, width)
            leaves = found.tokens.shape[1] + chosen
            parents = jnp.concatenate((parents, read.shape[1] - count + chosen // width), axis=1)
            read = jnp.concatenate((read, _take(added.tokens, chosen)), axis=1)
            found = _Nodes(
                *(jnp.concatenate(both, axis=1) for both in zip(found, added, strict=True))
            )
        return found, level.cache


class _Nodes(NamedTuple):
    """The nodes of a tree, [B, C] each.

    tokens, parents: int32, as in a `Proposal`.
    values: f32, the products of the probabilities along their paths.
    """

    tokens: jax.Array
    parents: jax.Array
    values: jax.Array


def _chances(
    level: DecodeState, logits: jax.Array, read: jax.Array, parents: jax.Array, count: int
) -> jax.Array:
    """The probabilities of the tokens after each of the last `count` places of a pass.

    logits: f32[B, 1 + R, V], after the last token and each of `read`, int32[B, R].
    Returns f32[B, count, V].
    """
    paths = trees.ancestors(parents) if read.shape[1] else None
    earlier = jax.tree.map(lambda leaf: leaf[:, -count:], level.earlier(read, paths))
    sampling = Sampling() if level.sampling is None else level.sampling
    chances = probabilities(logits[:, -count:], sampling, earlier)
    return jnp.where(chances > 0, chances, 0)  # NaN would be worth more than its parent


def _best(found: _Nodes, nodes: int) -> Proposal:
    """The most valuable nodes of a tree, the best first. Among equals, parents come first."""
    _, chosen = lax.top_k(found.values, nodes)
    rows, places = jnp.arange(len(chosen))[:, None], jnp.arange(nodes)
    numbers = jnp.full_like(found.parents, -1).at[rows, chosen].set(places)
    above = _take(found.parents, chosen)
    parents = jnp.where(above < 0, -1, _take(numbers, jnp.maximum(above, 0)))
    return Proposal(_take(found.tokens, chosen), parents=parents)


def _take(values: jax.Array, places: jax.Array) -> jax.Array:
    """values[b, places[b, i]]. [B, C], int32[B, N] -> [B, N]."""
    return jnp.take_along_axis(values, places, axis=1)
