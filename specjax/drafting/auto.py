"""Auto: every round drafts what pays on this machine, or nothing.

Three sources propose: the text so far (the tokens after an earlier occurrence of the last ones),
where there is one a memory of other texts, and where there is one a cheap reading of the model's
own weights. A round weighs, for each source and length, the tokens that the batch may expect
against the measured time of the passes, and takes the best; drafting nothing is one of the choices.
Expected tokens come from what was kept of each row's earlier drafts. A draft of the model ends with
the first token that the model is unsure of, so what such a round gains and takes is averaged whole.

The proposals of the text and the memory are judged in every round, drafted or not: the tokens that
came show whether they were right. So a row that begins to repeat itself, or another, is noticed
without a wasted pass. A look costs time too, on a GPU a tenth of a pass: a batch that lately gained
less than its looks took rests between them.

The choice looks at all rows together, because they share the pass. No output depends on it: drafts
of all sources are compared with the target's own tokens (`verification`), sampled ones too.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.row_sums import running_sums
from specjax.checks import shown
from specjax.drafting.acceptance_rates import Guess, Rates, Yields
from specjax.drafting.chain import LevelDrafter
from specjax.drafting.costs import WIDTHS, Costs
from specjax.drafting.suffix import Match, longest_match
from specjax.drafting.suffix_memory import CONTEXTS, COUNTS, SuffixMemory
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal, Verified

_LONGEST = 8  # last tokens that an earlier occurrence may share
_KINDS = (1, 2, 3, 5)  # occurrences are told apart by the fewest tokens that they share
# Acceptance before any is seen: for the text by kind, for the memory by context and count.
_OF_TEXT = (0.1, 0.25, 0.5, 0.75)
_OF_MEMORY = (
    (0.15, 0.3, 0.35), (0.3, 0.4, 0.5), (0.55, 0.65, 0.7), (0.75, 0.85, 0.95), (0.9, 0.95, 0.95),
)  # fmt: skip
_PRIORS = (*_OF_TEXT, *(prior for each in _OF_MEMORY for prior in each))
_REMEMBERED = len(_OF_TEXT)  # the first kind of the memory
_OF_MODEL = 0.85  # the model's acceptance before any is seen
_OF_SURE = 0.9  # and where its drafts end with the first unsure one
_SURE = 0.6  # the model's draft ends with a token of smaller probability
_FROM_MODEL = 2  # the place of the model among `Auto.sources`
_MARGIN = 1.08  # drafting must promise so much more than not drafting: the best guess flatters
_RISK = 0.05  # and for each pass that a round takes beyond one, so much more
_LAST_COUNTS = 4  # the power of a row's remaining rounds by which it counts
_BEFORE = 4.0  # rounds of one token that a row is taken to have had before its first
_HOPED = 0.25  # what a look gains before any, in tokens per row
_LOOKS = 8.0  # looks, roughly, over which gains are averaged
_MOST_LOOKING = 1 / 200  # of the time, where looks gain less than they take
assert len(_OF_MEMORY) == len(CONTEXTS) and len(_OF_MEMORY[0]) == len(COUNTS)


class AutoState(NamedTuple):
    """How the drafts of each row have fared.

    rates: shares of drafts that were kept, for the text and the memory, by kind.
    own: of rounds in which the model drafted.
    text, memory: what they propose in this round; no memory proposes nothing.
    source: int32[B], which of the three proposed in this round: 0, 1 or 2.
    worth: f32[B], tokens per row that looks lately gained, over plain decoding in their time.
    rest: int32[B], rounds until the next look.
    model: the own drafter's state; None without one.
    """

    rates: Rates
    own: Yields
    text: Guess
    memory: Guess
    source: jax.Array
    worth: jax.Array
    rest: jax.Array
    model: Any


class _Plan(NamedTuple):
    """The drafts of a round. text: int32[B], tokens of the guess; own: bool[], whether the model
    drafts instead; gain: f32[], tokens per row, as in `AutoState.worth`."""

    text: jax.Array
    own: jax.Array
    gain: jax.Array


class _Look(NamedTuple):
    """A round's guesses, the better one of each row and which it is, int32[B], and the plan."""

    text: Guess
    memory: Guess
    better: Guess
    source: jax.Array
    plan: _Plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Auto(Drafter):
    """Drafts from the text or with the model's cheap reading, as long as it pays, or not at all.

    costs: times of passes; None: measured when decoding begins, once per model, batch size and
        machine, or estimated for small models and inside `jax.jit`.
    draft: what drafts with the model, on the target's own KV cache: QSpec or LayerSkip; None: QSpec
        where the weights have a cheap reading and the costs that are measured say that it may pay;
        nothing where `costs` are given. Its drafts end with the first token of a smaller
        probability than 0.6, or than its own `confidence`, or where one more would cost more than
        it gains.
    memory: texts to draft from beside the row's own; rows add theirs while they are decoded. None:
        for many prompts (`decode_many`, `generate`, `stream_many`) an empty one, which they share;
        elsewhere none. Not for a model that is divided over a mesh.

    Inside a MultiLevel an Auto measures nothing: `costs` that are None are estimated, and a `draft`
    that is None is none.

    Raises ValueError where `draft` or `memory` is something else.
    """

    costs: Costs | None = None
    draft: LevelDrafter | None = None
    memory: SuffixMemory | None = None

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
    def inside(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.draft is None else ("draft",)

    @property
    def draft_length(self) -> int:
        return max(WIDTHS[-1], 0 if self.draft is None else self.draft.draft_length)

    def validate(self, params: Params, positions: int) -> None:
        if self.draft is not None:
            self.draft.validate(params, positions)
        if self.memory is not None:
            self._validate_memory(self.memory, params)

    def _validate_memory(self, memory: SuffixMemory, params: Params) -> None:
        if not isinstance(memory, SuffixMemory):
            raise ValueError(
                "memory of an Auto must be what specjax.SuffixMemory.create or load returns, "
                f"got {shown(memory)}"
            )
        if memory.vocab_size != params.config.vocab_size:
            raise ValueError(
                f"memory was made for a vocabulary of {memory.vocab_size} entries; the model has "
                f"{params.config.vocab_size}"
            )
        if params.mesh is not None:
            raise ValueError("memory must be None for a model that is divided over a mesh")

    def init(self, params: Params, state: DecodeState, width: int) -> AutoState:
        zeros = jnp.zeros_like(state.lengths)
        model = None if self.draft is None else self.draft.init(params, state, width)
        rates, nowhere = Rates.create(len(zeros), _PRIORS), self._nowhere(state)
        own = self._assumed(len(zeros))
        worth = jnp.full(len(zeros), _HOPED, jnp.float32)
        return AutoState(rates, own, nowhere.text, nowhere.memory, zeros, worth, zeros, model)

    def shared(self) -> SuffixMemory | None:
        return self.memory

    def learn(
        self, shared: SuffixMemory | None, tokens: jax.Array, begins: jax.Array, ends: jax.Array
    ) -> SuffixMemory | None:
        return None if shared is None else shared.learn(tokens, begins, ends)

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        resting = jnp.any((state.draft.rest > 0) & ~state.finished)
        nowhere = self._nowhere(state)
        look = lax.cond(resting, lambda: nowhere, lambda: self._look(state))
        padding = ((0, 0), (0, self.draft_length - WIDTHS[-1]))
        least = 0 if self.costs is None else self.costs.least
        tokens = jnp.pad(look.better.tokens, padding)
        proposal = Proposal(tokens, look.plan.text, least=least)
        cache = state.cache
        if self.draft is not None:
            proposal, cache = self._draft(params, state, proposal, look.plan.own)
        worth, rest = self._after_look(state, look.plan)
        draft = state.draft._replace(
            text=look.text, memory=look.memory,
            source=jnp.where(look.plan.own, _FROM_MODEL, look.source),
            worth=jnp.where(resting, state.draft.worth, worth),
            rest=jnp.where(resting, jnp.maximum(state.draft.rest - 1, 0), rest),
        )  # fmt: skip
        return proposal, dataclasses.replace(state, cache=cache, draft=draft)

    def rest(self, draft: AutoState) -> tuple[jax.Array | None, AutoState]:
        if self.costs is None or not self.costs.loops:
            return None, draft
        return jnp.max(draft.rest), draft._replace(rest=jnp.zeros_like(draft.rest))

    @property
    def sources(self) -> tuple[str, ...]:
        return "text", "memory", "model"

    def source(self, draft: AutoState) -> jax.Array:
        return draft.source

    def _nowhere(self, state: DecodeState) -> _Look:
        """The result of no look: nothing."""
        zeros = jnp.zeros_like(state.lengths)
        none = jnp.zeros((*zeros.shape, WIDTHS[-1]), jnp.int32)
        nothing = Guess(none, none, zeros)
        plan = _Plan(zeros, jnp.bool_(False), jnp.float32(0))
        return _Look(nothing, nothing, nothing, zeros, plan)

    def _look(self, state: DecodeState) -> _Look:
        room = jnp.maximum(state.limits - state.lengths - 1, 0)
        text, memory = self._guesses(state, room)
        rates = state.draft.rates
        better = rates.gains(memory)[:, -1] > rates.gains(text)[:, -1]
        guess = jax.tree.map(partial(_where, better), memory, text)
        plan = self._plan(state, guess, room)
        return _Look(text, memory, guess, better.astype(jnp.int32), plan)

    def _after_look(self, state: DecodeState, plan: _Plan) -> tuple[jax.Array, jax.Array]:
        """Returns the worth of looks, f32[B], and the rounds of rest that follow, int32[B]."""
        rows, look = state.lengths.shape, jnp.asarray(self._costs(len(state.lengths)).look)
        before = _mean(state.draft.worth, ~state.finished)
        worth = before + (plan.gain - before) / _LOOKS
        rest = jnp.where(worth < look, jnp.ceil(look / _MOST_LOOKING), 0).astype(jnp.int32)
        return jnp.broadcast_to(worth, rows), jnp.broadcast_to(rest, rows)

    def observe(self, draft: AutoState, verified: Verified) -> AutoState:
        came, rates = verified.emitted[:, : WIDTHS[-1]], draft.rates
        for guess in (draft.text, draft.memory):
            rates = rates.judged(guess, came, verified.count)
        return draft._replace(rates=rates, own=self._own_after(draft, verified))

    def _own_after(self, draft: AutoState, verified: Verified) -> Yields:
        drafted = (draft.source == _FROM_MODEL) & (verified.drafted > 0)
        rows = len(drafted)
        took = self._time(jnp.max(verified.drafted), rows)
        return draft.own.after(drafted, verified.accepted, took, self._assumed(rows))

    def _assumed(self, rows: int) -> Yields:
        """The yields of the model's drafts before any: those of the longest that it makes."""
        most = self._longest(rows)
        kept = running_sums(_OF_MODEL ** jnp.arange(1, WIDTHS[-1] + 1))
        return Yields.create(rows, kept[most - 1], self._time(most, rows))

    def _longest(self, rows: int) -> jax.Array:
        """The length of the model's drafts that gains the most where nearly all are kept, int32[].

        One more token costs a pass of the draft and a wider verification. In a large batch that
        is soon more than the token is worth, however sure the model is of it.
        """
        lengths = jnp.arange(1, WIDTHS[-1] + 1)
        gained = 1 + running_sums(_OF_SURE**lengths)
        return lengths[jnp.argmax(gained / self._time(lengths, rows))]

    def _time(self, drafts: jax.Array, rows: int) -> jax.Array:
        """The times of rounds with so many drafts of the model, int32[…] -> f32[…]."""
        costs = self._costs(rows)
        most = jnp.minimum(drafts, WIDTHS[-1])
        wider = jnp.searchsorted(jnp.array(WIDTHS), most, method="compare_all")
        return drafts * costs.draft + jnp.asarray(costs.passes)[wider]

    def _costs(self, rows: int) -> Costs:
        return Costs.usual(rows) if self.costs is None else self.costs

    def _guesses(self, state: DecodeState, room: jax.Array) -> tuple[Guess, Guess]:
        """The proposals of the text and of the memory, no longer than there is room: int32[B]."""
        match = longest_match(state.tokens, state.lengths, _LONGEST, WIDTHS[-1])
        kinds = jnp.broadcast_to(_kind(match)[:, None], match.tokens.shape)
        text = Guess(match.tokens, kinds, jnp.minimum(match.counts, room))
        if state.shared is None:
            return text, state.draft.memory
        found = state.shared.follow(state.tokens, state.lengths, WIDTHS[-1])
        kinds, counts = _REMEMBERED + found.kinds, jnp.minimum(found.counts, room)
        return text, Guess(found.tokens, kinds, counts)

    def _plan(self, state: DecodeState, guess: Guess, room: jax.Array) -> _Plan:
        """Chooses the source and the length that bring the batch to its end the soonest."""
        costs = self._costs(state.tokens.shape[0])
        weights, running = _weights(state), ~state.finished
        widths = jnp.array(WIDTHS)
        gains = state.draft.rates.gains(guess)[:, widths]
        speeds = jnp.sum(weights[:, None] * gains, axis=0) / costs.passes
        speeds = speeds / jnp.where(widths > 0, _margin(costs.passes), 1.0)
        best = jnp.argmax(speeds)
        text, speed = jnp.minimum(guess.counts, widths[best]), speeds[best]
        own, time = jnp.bool_(False), jnp.asarray(costs.passes)[best]
        if self.draft is not None:
            kept, took = state.draft.own.a_round()
            gains, took = jnp.sum(weights * (1 + jnp.minimum(kept, room))), _mean(took, running)
            own_speed = gains / took / _margin(took)
            own = own_speed > speed
            text = jnp.where(own, 0, text)
            speed, time = jnp.where(own, own_speed, speed), jnp.where(own, took, time)
        plain = jnp.where(jnp.any(running), speeds[0], 1.0)
        return _Plan(text, own, time * (speed / plain - 1))

    def _draft(
        self, params: Params, state: DecodeState, proposal: Proposal, own: jax.Array
    ) -> tuple[Proposal, KVCache]:
        """The model's drafts, if `own`: bool[] says so, in place of the text's."""
        drafter = self.draft
        assert drafter is not None

        def turn(carry: tuple[jax.Array, Proposal, KVCache]) -> tuple[jax.Array, Proposal, KVCache]:
            _, text, cache = carry
            level = drafter.enter(state.draft.model, dataclasses.replace(state, cache=cache))
            room = jnp.maximum(state.limits - state.lengths - 1, 1)
            wanted = jnp.minimum(self._longest(len(room)), room)
            drafted, cache = drafter.draft(
                drafter.model(params), level, wanted, _SURE, coupled=True
            )
            missing = self.draft_length - drafted.tokens.shape[1]
            tokens = jnp.pad(drafted.tokens, ((0, 0), (0, missing)))
            assert drafted.counts is not None
            _, cache = drafter.leave(state.draft.model, state, cache, state.lengths)
            return (
                jnp.bool_(False),
                dataclasses.replace(text, tokens=tokens, counts=drafted.counts),
                cache,
            )

        # A loop of at most one turn: XLA updates its cache in place but copies a conditional's.
        carry = own, proposal, state.cache
        _, proposal, cache = lax.while_loop(lambda carry: carry[0], turn, carry)
        return proposal, cache


def _weights(state: DecodeState) -> jax.Array:
    """The worth of a token of each row to the batch, f32[B]; zero in a finished row.

    A batch whose rows are not replaced ends with its last row: one that will end before the others,
    at the tokens per round that it has had, gains nothing by more drafts. Rows that share a memory
    are replaced when they end, and their tokens are worth the same.
    """
    running = (~state.finished).astype(jnp.float32)
    if state.shared is not None:
        return running
    a_round = (state.stats.generated + _BEFORE) / (state.stats.rounds + _BEFORE)
    left = running * (state.limits - state.lengths) / a_round
    return running * (left / jnp.maximum(jnp.max(left), 1)) ** _LAST_COUNTS


def _margin(time: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """How much more than plain decoding a round must promise that takes so many passes.

    A draft of seven tokens in a large batch takes as long as five passes, and may gain nothing.
    """
    return _MARGIN + _RISK * (time - 1)


def _mean(values: jax.Array, rows: jax.Array) -> jax.Array:
    """The mean over some rows, f32[B], bool[B] -> f32[]; zero over none."""
    return jnp.sum(rows * values) / jnp.maximum(jnp.sum(rows), 1)


def _kind(match: Match) -> jax.Array:
    """The kind of each row's match, int32[B] in 0 … 3."""
    kinds = jnp.array(_KINDS)
    kind = jnp.searchsorted(kinds, match.length, side="right", method="compare_all") - 1
    return jnp.maximum(kind, 0).astype(jnp.int32)


def _where(chosen: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """Rows of one or the other. bool[B], [B, …], [B, …] -> [B, …]."""
    return jnp.where(chosen.reshape(-1, *(1,) * (yes.ndim - 1)), yes, no)
