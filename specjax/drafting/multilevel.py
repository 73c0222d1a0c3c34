"""Several levels: a drafting model is itself drafted for (ML-SpecQD, section III).

Every level below the target is a loop of rounds like the target's own: what is cheaper than the
level's model proposes, the level's model verifies, until each row has its drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import shown
from specjax.drafting.chain import ChainDrafter, LevelDrafter, LevelState
from specjax.drafting.translated import TranslatedDraft
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.rounds import step
from specjax.speculation.state import DecodeState, Proposal, Stats, Verified

_Carry = tuple[DecodeState, jax.Array | None]


class MultiLevelState(NamedTuple):
    """outer, inner: the two drafters' own states; stats: counts of their rounds."""

    outer: LevelState
    inner: object
    stats: Stats

    def shortened(self, slots: jax.Array) -> MultiLevelState:
        """Gives up what the caches of all levels hold from `slots` on, int32[B]."""
        inner = _shortened(self.inner, slots)
        return self._replace(outer=self.outer.shortened(slots), inner=inner)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiLevel(Drafter):
    """`outer` drafts for the target, `inner` for `outer`. Both may be MultiLevel's parts again.

    outer: a drafter that runs a model: DraftModel, QSpec or LayerSkip. Its draft_length and its
        confidence are those of the whole.
    inner: any drafter, an Auto without a memory.

    Stats of the level between them are `DecodeResult.levels`.

    Raises ValueError where `outer` cannot be drafted for, or `inner` has a memory.
    """

    outer: LevelDrafter
    inner: Drafter

    inside = ("outer", "inner")

    def __post_init__(self) -> None:
        # JAX passes placeholders here while it unflattens the tree; skip them.
        if isinstance(self.outer, Drafter) and not isinstance(self.outer, LevelDrafter):
            raise ValueError(
                f"outer must draft with a model (DraftModel, QSpec, LayerSkip), got {self.outer!r}"
            )
        if isinstance(self.inner, Drafter) and self.inner.shared() is not None:
            raise ValueError("inner of a MultiLevel takes no memory: pass it to an Auto alone")

    @classmethod
    def of(cls, levels: Sequence[Drafter]) -> Drafter:
        """Drafters from the target's own down to the cheapest, nested.

        Raises ValueError if none is given, or one is given twice.
        """
        if not isinstance(levels, Sequence) or not levels:
            raise ValueError(f"levels must be at least one drafter, got {shown(levels)}")
        if len({id(level) for level in levels}) < len(levels):
            raise ValueError("levels hold one drafter twice: no level can draft for itself")
        return reduce(lambda inner, outer: cls(outer, inner), reversed(levels))  # type: ignore[arg-type]

    @classmethod
    def paper(cls, outer: LevelDrafter, inner: ChainDrafter) -> MultiLevel:
        """ML-SpecQD's settings (section IV): both levels draft up to 8 tokens, and a draft ends
        with a token of smaller probability than 0.4, or 0.65 where the level has another tokenizer
        than the one above.

        Args:
          outer: the target's MXFP4 cast, a DraftModel.
          inner: a small model, a DraftModel or TranslatedDraft.

        Returns:
          The two levels.

        Raises:
          ValueError: one of them does not draft with a model.
        """
        for name, level in (("outer", outer), ("inner", inner)):
            if not isinstance(level, ChainDrafter):
                raise ValueError(f"{name} must draft with a model, got {shown(level)}")
        confidence = 0.65 if isinstance(inner, TranslatedDraft) else 0.4
        return cls(
            dataclasses.replace(outer, draft_length=8, confidence=0.4),  # type: ignore[type-var]
            dataclasses.replace(inner, draft_length=8, confidence=confidence),  # type: ignore[type-var]
        )

    @property
    def draft_length(self) -> int:
        return self.outer.draft_length

    @property
    def reach(self) -> int:
        """The last round of the level between writes what `inner` proposes, all but its last
        drafts being there."""
        return max(self.draft_length, self.draft_length - 1 + self.inner.reach)

    @property
    def skippable(self) -> bool:
        return self.outer.skippable and self.inner.skippable

    def validate(self, params: Params, positions: int) -> None:
        self.outer.validate(params, positions)
        self.inner.validate(self.outer.model(params), positions)

    def init(self, params: Params, state: DecodeState, width: int) -> MultiLevelState:
        outer = self.outer.init(params, state, width)
        stats = Stats.zeros(state.tokens.shape[0])
        level = self._enter(MultiLevelState(outer, None, stats), state)
        inner = self.inner.init(self.outer.model(params), level, width)
        return MultiLevelState(outer, inner, stats)

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        model, outer = self.outer.model(params), self.outer
        level = self._enter(state.draft, state)

        def one_round(carry: _Carry) -> _Carry:
            level, distributions = carry
            before = level.lengths
            level, verified = step(model, level, self.inner, outer.activation, outer.layers)
            if distributions is not None:
                assert verified.distributions is not None
                distributions = _record(distributions, verified, before - state.lengths)
            return level, distributions

        distributions = None
        if state.sampling is not None:
            distributions = jnp.zeros((*state.finished.shape, self.draft_length, state.vocab_size))
        level, distributions = lax.while_loop(
            lambda carry: ~jnp.all(carry[0].finished), one_round, (level, distributions)
        )
        drafted = state.lengths[:, None] + jnp.arange(self.draft_length)
        tokens = jnp.take_along_axis(level.tokens, drafted, axis=1)
        whole = outer.schedule is None and outer.confidence is None
        counts = None if whole else level.lengths - state.lengths
        kept, cache = outer.leave(state.draft.outer, state, level.cache, level.cache.lengths)
        draft = MultiLevelState(kept, level.draft, level.stats)
        proposal = Proposal(tokens, counts, distributions, least=1)
        return proposal, dataclasses.replace(state, cache=cache, draft=draft)

    def observe(self, draft: MultiLevelState, verified: Verified) -> MultiLevelState:
        # Refused drafts are in the caches of all levels below.
        return draft._replace(
            outer=self.outer.observe(draft.outer, verified),
            inner=_shortened(draft.inner, verified.agreed),
        )

    def levels(self, draft: MultiLevelState) -> tuple[Stats, ...]:
        return (draft.stats, *self.inner.levels(draft.inner))

    def _enter(self, draft: MultiLevelState, state: DecodeState) -> DecodeState:
        """The state of the level between: it ends when each row has its drafts."""
        level = self.outer.enter(draft.outer, state)
        wanted = self.outer.wanted(draft.outer.schedule, state)
        keys = state.keys
        if keys is not None:  # apart from those of any round above
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 2**31 - 1)
        return dataclasses.replace(
            level,
            tokens=jnp.pad(state.tokens, ((0, 0), (0, self.draft_length))),
            limits=state.lengths + (self.draft_length if wanted is None else wanted),
            keys=keys,
            draft=draft.inner,
            stats=draft.stats,
            stop_tokens=(),
            depth=state.depth + 1,
            confidence=self.outer.confidence,
            logprobs=None,
        )


def _shortened(draft: object, slots: jax.Array) -> object:
    """A drafter's own state without what its caches, if it has any, hold from `slots` on."""
    return draft.shortened(slots) if isinstance(draft, LevelState | MultiLevelState) else draft


def _record(distributions: jax.Array, verified: Verified, first: jax.Array) -> jax.Array:
    """Puts what a round's tokens were drawn from at places first … first + count - 1 of a row."""
    rows, length, _ = distributions.shape
    index = jnp.arange(verified.emitted.shape[1])
    places = jnp.where(index < verified.count[:, None], first[:, None] + index, length)
    return distributions.at[jnp.arange(rows)[:, None], places].set(
        verified.distributions, mode="drop"
    )
