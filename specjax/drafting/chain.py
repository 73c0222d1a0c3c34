"""Drafting one token after another with a model: what QSpec, LayerSkip and DraftModel share.

They differ in the weights, layers and precision of the pass that drafts, and in whether it shares
the target's KV cache (whose entries the verification then overwrites) or keeps its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels.activations import Activation, check_activation
from pallas_kernels.row_sums import row_max, row_sum
from specjax.checks import check_integer
from specjax.drafting.schedules import Schedule, check_schedule
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params, check_is_params
from specjax.model.transformer import forward, prefill_in_chunks
from specjax.speculation.drafter import Drafter
from specjax.speculation.penalties import Earlier
from specjax.speculation.sampling import draw, greedy, probabilities, uniform_pairs
from specjax.speculation.state import DecodeState, Proposal, Verified
from specjax.speculation.verification import fit_vocabulary, score


class ChainDrafter(Drafter):
    """Base of the drafters that run a model. Their dataclasses hold some of these fields:

    draft_length: the most tokens per draft.
    activation: activation precision of the drafting pass.
    layers: the layers that it runs; None: all.
    confidence: a row's draft ends with the first token that the drafting model gives a smaller
        probability than this; None: never before its length.
    schedule: how many tokens to draft; None: always draft_length.
    window: how many positions back it sees, beside the first few; None: all.

    Their states hold the schedule's under the name `schedule`.
    """

    draft_length: int
    activation: Activation
    layers: tuple[int, ...] | None = None
    confidence: float | None = None
    schedule: Schedule | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if check_integer("draft_length", self.draft_length) < 1:
            raise ValueError(
                f"draft_length must be at least 1, got {self.draft_length}; "
                "Autoregressive() decodes without drafts"
            )
        check_activation(self.activation)
        if self.window is not None and check_integer("window", self.window) < 1:
            raise ValueError(f"window must be at least 1 or None, got {self.window}")
        confidence = self.confidence
        if confidence is not None and not (
            isinstance(confidence, int | float) and 0 < confidence <= 1
        ):
            raise ValueError(f"confidence must be in (0, 1] or None, got {confidence!r}")
        check_schedule(self.schedule)

    def observe(self, draft: Any, verified: Verified) -> Any:
        if self.schedule is None:
            return draft
        return draft._replace(schedule=self.schedule.update(draft.schedule, verified))

    def first_schedule(self, rows: int) -> Any:
        """The schedule's state before the first round; None without a schedule."""
        return None if self.schedule is None else self.schedule.init(rows, self.draft_length)

    def wanted(self, schedule: Any, state: DecodeState) -> Int32[Array, " B"] | None:
        """Tokens to draft, int32[B], within each row's limit; None without a schedule.

        schedule: the schedule's state.
        """
        if self.schedule is None:
            return None
        lengths = self.schedule.lengths(schedule, self.draft_length)
        return jnp.clip(lengths, 1, jnp.maximum(state.limits - state.lengths - 1, 1))

    def draft(
        self,
        model: Params,
        level: DecodeState,
        wanted: Int32[Array, " B"] | None,
        confidence: float | None = None,
        coupled: bool = False,
    ) -> tuple[Proposal, KVCache]:
        """Runs the drafting model over the state as it sees it. Returns as `draft_chain` does.

        confidence: used where the drafter has none.
        """
        confidence = confidence if self.confidence is None else self.confidence
        return draft_chain(
            model, level, self.draft_length, wanted, confidence, self.activation, self.layers,
            coupled,
        )  # fmt: skip


class LevelState(NamedTuple):
    """The drafting model's own cache, if it has one, and the schedule's state."""

    cache: KVCache | None
    schedule: Any

    def shortened(self, slots: jax.Array) -> LevelState:
        """Gives up what the cache holds from `slots` on, int32[B]: refused drafts' entries."""
        if self.cache is None:
            return self
        lengths = jnp.minimum(self.cache.lengths, slots)
        return self._replace(cache=self.cache.with_lengths(lengths))


class LevelDrafter(ChainDrafter):
    """Base of the chain drafters in the target's own tokens, which `MultiLevel` can draft for."""

    @property
    def own_cache(self) -> bool:
        """Whether the drafting model keeps a cache of its own."""
        return False

    @property
    def skippable(self) -> bool:
        return not self.own_cache  # which would lack the round's tokens

    def model(self, params: Params) -> Params:
        """The model that drafts for `params`."""
        return params

    def init(self, params: Params, state: DecodeState, width: int) -> LevelState:
        cache = None
        if self.own_cache:
            cache = self.first_cache(params, state, width).with_window(self.window)
        return LevelState(cache, self.first_schedule(state.tokens.shape[0]))

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        level = self.enter(state.draft, state)
        wanted = self.wanted(state.draft.schedule, state)
        proposal, cache = self.draft(self.model(params), level, wanted)
        drafted = self.draft_length if proposal.counts is None else proposal.counts
        drafted = jnp.where(state.finished, 0, drafted)
        draft, cache = self.leave(state.draft, state, cache, state.lengths - 1 + drafted)
        return proposal, dataclasses.replace(state, cache=cache, draft=draft)

    def observe(self, draft: LevelState, verified: Verified) -> LevelState:
        # Not left to `enter`: the level above may add tokens before it looks.
        updated: LevelState = super().observe(draft, verified)
        return updated.shortened(verified.agreed)

    def lag(self, above: int, depth: int) -> int:
        """The most tokens before the last that the drafting model's cache may lack.

        After drafts that were accepted whole, a cache of its own lacks one token per model above:
        the one that each of them added to its draft.

        above, depth: lag and depth of the level above, as in `DecodeState`.
        """
        return depth + 1 if self.own_cache else above

    def enter(self, draft: LevelState, state: DecodeState) -> DecodeState:
        """The state as the drafting model sees it: with the cache that it reads and writes."""
        if draft.cache is None:
            return dataclasses.replace(state, cache=state.cache.with_window(self.window))
        # The last token has not been read.
        cached = jnp.minimum(draft.cache.lengths, state.lengths - 1)
        cache = draft.cache.with_lengths(cached)
        return dataclasses.replace(state, cache=cache, lag=self.lag(state.lag, state.depth))

    def leave(
        self, draft: LevelState, state: DecodeState, cache: KVCache, filled: Int32[Array, " B"]
    ) -> tuple[LevelState, KVCache]:
        """Puts away the cache that `enter` gave out, with entries in its first `filled` slots.

        Returns the drafter's state, and the cache of the level above.
        """
        if draft.cache is None:
            cache = cache.with_lengths(state.cache.lengths)
            return draft, cache.with_window(state.cache.window)
        return draft._replace(cache=cache.with_lengths(filled)), state.cache

    def first_cache(self, params: Params, state: DecodeState, width: int) -> KVCache:
        """The drafting model's own cache, with entries of all prompt tokens but the last."""
        model = self.model(params)
        rows = state.tokens.shape[0]
        cache = KVCache.create(
            model.config, rows, state.cache.capacity, state.cache.bits, model.num_kv_heads
        )
        return prefill_in_chunks(
            model, state.tokens[:, : width - 1], state.lengths - 1, cache, self.activation,
            self.layers,
        )  # fmt: skip


def check_draft_params(drafter: Drafter, params: object) -> None:
    """Raises ValueError unless `params`, a field of the drafter, is a model."""
    check_is_params(params, f"params of a {type(drafter).__name__}")


class _Chain(NamedTuple):
    """A draft of `drafted` passes so far. The next one reads `token`: int32[B]."""

    drafted: jax.Array
    token: jax.Array
    drafting: jax.Array
    counts: jax.Array
    tokens: jax.Array
    distributions: jax.Array | None
    earlier: Earlier
    cache: KVCache


def draft_chain(
    params: Params,
    state: DecodeState,
    length: int,
    wanted: Int32[Array, " B"] | None,
    confidence: float | None,
    activation: Activation,
    layers: tuple[int, ...] | None,
    coupled: bool = False,
) -> tuple[Proposal, KVCache]:
    """Up to `length` tokens per row, drawn one after another.

    wanted: int32[B] in 1 … length, where each row ends; None: at `length`.
    coupled: draw with the random numbers that the target's own draws at these places use. The
        proposal then counts as chosen without chance: it is kept where both draw the same token.

    Returns the proposal, and the cache with the entries of what the passes read.
    """
    dynamic = wanted is not None or confidence is not None

    def extend(chain: _Chain, logits: jax.Array, cache: KVCache) -> _Chain:
        """The chain with the token that these logits, f32[B, V], give."""
        token, distribution, probability = _choose(logits, state, chain, coupled)
        counts = chain.counts + chain.drafting
        drafting = chain.drafting
        if wanted is not None:
            drafting &= counts < wanted
        if confidence is not None:
            drafting &= probability >= confidence
        earlier, distributions = chain.earlier.and_then(token), chain.distributions
        if distributions is not None:
            distributions = distributions.at[:, chain.drafted].set(distribution)
        tokens = chain.tokens.at[:, chain.drafted].set(token)
        return _Chain(
            chain.drafted + 1, token, drafting, counts, tokens, distributions, earlier, cache
        )

    def one_pass(chain: _Chain) -> _Chain:
        cache = chain.cache.with_lengths(state.lengths - 1 + chain.drafted)
        logits, cache = forward(
            params, chain.token[:, None], cache.lengths[:, None], cache,
            activation=activation, layers=layers,
        )  # fmt: skip
        return extend(chain, fit_vocabulary(logits[:, 0], state.vocab_size), cache)

    def more(chain: _Chain) -> jax.Array:
        return (chain.drafted < length) & jnp.any(chain.drafting)

    chain = _begin(state, length, coupled)
    if state.lag:  # what the cache lacks goes first, in one pass
        logits, cache = score(params, state, chain.tokens[:, :0], activation, layers)
        chain = extend(chain, logits[:, 0], cache)
    chain = lax.while_loop(more, one_pass, chain)
    counts = chain.counts if dynamic else None
    return Proposal(chain.tokens, counts, chain.distributions, least=1), chain.cache


def _begin(state: DecodeState, length: int, coupled: bool) -> _Chain:
    """The empty chain. A finished row does not draft, and keeps no other row waiting."""
    rows, _ = state.tokens.shape
    none = jnp.zeros((rows, 0), jnp.int32)
    distributions = None
    if state.sampling is not None and not coupled:
        distributions = jnp.zeros((rows, length, state.vocab_size))
    return _Chain(
        drafted=jnp.int32(0),
        token=state.last_tokens,
        drafting=~state.finished,
        counts=jnp.zeros(rows, jnp.int32),
        tokens=jnp.zeros((rows, length), jnp.int32),
        distributions=distributions,
        earlier=state.earlier(none).at(0),
        cache=state.cache,
    )


def _choose(
    logits: jax.Array, state: DecodeState, chain: _Chain, coupled: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """The next token of each row, what it was drawn from, and its probability. f32[B, V] in."""
    if state.sampling is None:
        token = greedy(logits)
        return token, None, 1 / row_sum(jnp.exp(logits - row_max(logits)))[..., 0]
    if coupled:
        keys = state.place_keys(jnp.broadcast_to(chain.drafted, (*logits.shape[:1], 1)))[:, 0]
    else:
        keys = jax.vmap(jax.random.fold_in, (0, None))(state.round_keys(purpose=0), chain.drafted)
    distribution = probabilities(logits, state.sampling, chain.earlier)
    token = draw(uniform_pairs(keys), distribution)
    probability = jnp.take_along_axis(distribution, token[:, None], axis=1)[:, 0]
    return token, distribution, probability
