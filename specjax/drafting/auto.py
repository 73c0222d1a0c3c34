"""Auto: every round drafts what pays on this machine, or nothing.

Two sources propose: the text so far (the tokens after an earlier occurrence of the last ones) and,
where there is one, a cheap reading of the model's own weights. A round weighs, for each source and
length, the tokens that the batch may expect against the measured time of the passes, and takes the
best; drafting nothing is one of the choices. Expected tokens come from what was kept of each row's
earlier drafts (Leviathan et al. 2023, equation 1).

The text's proposals are judged in every round, drafted or not: the tokens that came show whether
they were right. So a row that begins to repeat itself is noticed without a wasted pass.

The choice looks at all rows together, because they share the pass. No output depends on it: drafts
of both sources are compared with the target's own tokens (`verification`), sampled ones too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.checks import shown
from specjax.drafting.chain import LevelDrafter
from specjax.drafting.suffix import Match, longest_match
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal, Verified

WIDTHS = (0, 1, 3, 7)  # drafts per pass, as wide as verification makes its passes
_LONGEST = 8  # last tokens that an earlier occurrence may share
_KINDS = (1, 2, 3, 5)  # occurrences are told apart by the fewest tokens that they share
_PRIOR = (0.1, 0.25, 0.5, 0.75, 0.9)  # acceptance before any is seen; the last is the model's
_WEIGHT = 4.0  # drafts that the prior counts for
_MEMORY = 32.0  # drafts, roughly, over which acceptance is averaged
_MARGIN = 1.02  # drafting must promise so much more than not drafting
_OWN = len(_KINDS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of passes over a batch, in plain passes of the target.

    passes: f32[4], over 0, 1, 3 and 7 drafts per row; the first is 1.
    draft: f32[], a pass of the model's cheap reading over one token per row.
    """

    passes: jax.Array | np.ndarray
    draft: jax.Array | np.float32

    @classmethod
    def usual(cls, rows: int) -> Costs:
        """Costs where none were measured: a pass takes 5 % longer for every token that one row
        adds, until it takes as long as a pass per token."""
        share = min(1.0, 0.05 * rows)
        passes = np.array([1 + width * share for width in WIDTHS], np.float32)
        return cls(passes, np.float32(1.0))


class AutoState(NamedTuple):
    """What was kept of each row's drafts, by kind: four of the text's, and the model's own.

    kept, tested: f32[B, 5], recent drafts that were kept, and that were decided on.
    match: the text's proposal of this round.
    own: bool[B], whether the model drafted in this round.
    model: the own drafter's state; None without one.
    """

    kept: jax.Array
    tested: jax.Array
    match: Match
    own: jax.Array
    model: Any


class _Plan(NamedTuple):
    """What a round drafts. text: int32[B], tokens of the match; own: int32[], of the model."""

    text: jax.Array
    own: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Auto(Drafter):
    """Drafts from the text or with the model's cheap reading, as long as it pays, or not at all.

    costs: times of passes; None: measured when decoding begins, once per model, batch size and
        machine, or estimated for small models and inside `jax.jit`.
    draft: what drafts with the model, on the target's own KV cache: QSpec or LayerSkip; None: QSpec
        where the weights have a cheap reading and it may pay.

    Raises ValueError where `draft` is something else.
    """

    costs: Costs | None = None
    draft: LevelDrafter | None = None

    def __post_init__(self) -> None:
        # JAX passes placeholders here while it unflattens the tree; skip them.
        draft = self.draft
        if not isinstance(draft, Drafter):
            return
        if not isinstance(draft, LevelDrafter) or draft.own_cache or draft.schedule is not None:
            raise ValueError(
                "draft of an Auto must draft on the target's KV cache and without a schedule, such "
                f"as QSpec(), got {shown(draft)}"
            )

    @property
    def draft_length(self) -> int:
        return max(WIDTHS[-1], 0 if self.draft is None else self.draft.draft_length)

    def validate(self, params: Params, positions: int) -> None:
        if self.draft is not None:
            self.draft.validate(params, positions)

    def init(self, params: Params, state: DecodeState, width: int) -> AutoState:
        rows = state.tokens.shape[0]
        tested = jnp.full((rows, len(_PRIOR)), _WEIGHT)
        zeros = jnp.zeros(rows, jnp.int32)
        match = Match(jnp.zeros((rows, WIDTHS[-1]), jnp.int32), zeros, zeros)
        model = None if self.draft is None else self.draft.init(params, state, width)
        return AutoState(tested * jnp.array(_PRIOR), tested, match, zeros > 0, model)

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        match = longest_match(state.tokens, state.lengths, _LONGEST, WIDTHS[-1])
        room = jnp.maximum(state.limits - state.lengths - 1, 0)
        match = match._replace(counts=jnp.minimum(match.counts, room))
        plan = self._plan(state, match, room)
        padding = ((0, 0), (0, self.draft_length - WIDTHS[-1]))
        proposal = Proposal(jnp.pad(match.tokens, padding), plan.text)
        cache = state.cache
        if self.draft is not None:
            proposal, cache = self._draft(params, state, proposal, plan.own)
        own = jnp.broadcast_to(plan.own > 0, state.finished.shape)
        draft = state.draft._replace(match=match, own=own)
        return proposal, dataclasses.replace(state, cache=cache, draft=draft)

    def observe(self, draft: AutoState, verified: Verified) -> AutoState:
        match = draft.match
        came = verified.emitted[:, : WIDTHS[-1]]
        decided = jnp.minimum(match.counts, verified.count)
        right = (match.tokens == came) & (jnp.arange(WIDTHS[-1]) < decided[:, None])
        kept = jnp.sum(jnp.cumprod(right, axis=1, dtype=jnp.int32), axis=1)
        of_text = jax.nn.one_hot(_kind(match), _OWN + 1), jnp.minimum(kept + 1, decided), kept
        by_model = (
            jnp.where(draft.own, verified.tested, 0),
            jnp.where(draft.own, verified.accepted, 0),
        )
        of_model = jax.nn.one_hot(jnp.full_like(kept, _OWN), _OWN + 1), *by_model
        moved = draft
        for kind, tested, kept in (of_text, of_model):
            fade = (1 - 1 / _MEMORY) ** (kind * tested[:, None])
            moved = moved._replace(
                kept=moved.kept * fade + kind * kept[:, None],
                tested=moved.tested * fade + kind * tested[:, None],
            )
        return _forget(moved, ~draft.own)

    def _plan(self, state: DecodeState, match: Match, room: jax.Array) -> _Plan:
        """Chooses the source and the length that promise the batch the most tokens per second."""
        rows = state.tokens.shape[0]
        costs = Costs.usual(rows) if self.costs is None else self.costs
        running = (~state.finished).astype(jnp.float32)[:, None]
        rates = state.draft.kept / state.draft.tested
        widths = jnp.array(WIDTHS)
        rate = jnp.take_along_axis(rates, _kind(match)[:, None], axis=1)
        gains = _expected(rate, WIDTHS[-1])
        gains = jnp.take_along_axis(gains, jnp.minimum(widths, match.counts[:, None]), axis=1)
        speeds = jnp.sum(running * gains, axis=0) / costs.passes
        speeds = speeds / jnp.where(widths > 0, _MARGIN, 1.0)
        width = widths[jnp.argmax(speeds)]
        text = jnp.minimum(match.counts, width)
        if self.draft is None:
            return _Plan(text, jnp.int32(0))
        longest = self.draft.draft_length
        drafts = jnp.arange(1, longest + 1)
        wider = jnp.searchsorted(widths, jnp.minimum(drafts, WIDTHS[-1]))
        times = drafts * costs.draft + costs.passes[wider]
        gains = _expected(rates[:, _OWN:], longest)
        gains = jnp.take_along_axis(gains, jnp.minimum(drafts, room[:, None]), axis=1)
        own_speeds = jnp.sum(running * gains, axis=0) / times / _MARGIN
        better = jnp.max(own_speeds) > jnp.max(speeds)
        own = jnp.where(better, jnp.argmax(own_speeds) + 1, 0).astype(jnp.int32)
        return _Plan(jnp.where(better, 0, text), own)

    def _draft(
        self, params: Params, state: DecodeState, proposal: Proposal, own: jax.Array
    ) -> tuple[Proposal, KVCache]:
        """The model's drafts, `own` per row, in place of the text's unless that is 0."""
        drafter = self.draft
        assert drafter is not None

        def turn(carry: tuple[jax.Array, Proposal, KVCache]) -> tuple[jax.Array, Proposal, KVCache]:
            _, text, cache = carry
            level = dataclasses.replace(state, cache=cache)
            wanted = jnp.broadcast_to(own, state.lengths.shape)
            drafted, cache = drafter.draft(drafter.model(params), level, wanted, coupled=True)
            missing = self.draft_length - drafted.tokens.shape[1]
            tokens = jnp.pad(drafted.tokens, ((0, 0), (0, missing)))
            assert drafted.counts is not None
            cache = cache.with_lengths(state.cache.lengths)
            return (
                jnp.bool_(False),
                dataclasses.replace(text, tokens=tokens, counts=drafted.counts),
                cache,
            )

        # A loop of at most one turn: XLA updates its cache in place but copies a conditional's.
        carry = own > 0, proposal, state.cache
        _, proposal, cache = lax.while_loop(lambda carry: carry[0], turn, carry)
        return proposal, cache


def _kind(match: Match) -> jax.Array:
    """The kind of each row's match, int32[B] in 0 … 3."""
    kind = jnp.searchsorted(jnp.array(_KINDS), match.length, side="right") - 1
    return jnp.maximum(kind, 0).astype(jnp.int32)


def _expected(rate: jax.Array, longest: int) -> jax.Array:
    """Tokens that a round of 0 … N drafts is expected to gain, from f32[B, 1] -> f32[B, N + 1]."""
    return jnp.cumsum(rate ** jnp.arange(longest + 1), axis=1)


def _forget(draft: AutoState, idle: jax.Array) -> AutoState:
    """Moves what is known of the model's drafts towards the prior where it did not draft.

    So a source that was refused is tried again from time to time. idle: bool[B].
    """
    fade = jnp.where(idle, 1 - 1 / _MEMORY, 1.0)

    def towards(values: jax.Array, prior: float) -> jax.Array:
        return values.at[:, _OWN].set(prior + (values[:, _OWN] - prior) * fade)

    return draft._replace(
        kept=towards(draft.kept, _PRIOR[_OWN] * _WEIGHT), tested=towards(draft.tested, _WEIGHT)
    )
