"""The state of the decoding loop, and the values that pass between its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key

from specjax.model.kv_cache import KVCache
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.penalties import NOTHING, Earlier, count_tokens
from specjax.speculation.sampling import Sampling

_ROUNDS = 2**31  # numbers of rounds begin here, behind those of places
_PURPOSES = 2  # keys per round


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts per row, int32[B] each.

    rounds: draft-verify rounds, one target pass each.
    drafted: tokens proposed.
    tested: proposed tokens that the target decided on: all up to the first rejected one. In a tree
        the children of a node count as one, since at most one of them is accepted.
    accepted: tested tokens that the target agreed with, whether or not a limit then cut them off.
    generated: tokens emitted, the target's own included.
    """

    rounds: jax.Array
    drafted: jax.Array
    tested: jax.Array
    accepted: jax.Array
    generated: jax.Array

    @classmethod
    def zeros(cls, rows: int) -> Stats:
        return cls(*(jnp.zeros(rows, jnp.int32) for _ in dataclasses.fields(cls)))

    @property
    def acceptance_rate(self) -> Float32[Array, ""]:
        """Share of drafted tokens that were accepted, over all rows (QSpec section 4.4). f32[]."""
        return jnp.sum(self.accepted) / jnp.maximum(jnp.sum(self.drafted), 1)

    @property
    def token_acceptance(self) -> Float32[Array, ""]:
        """Probability that a draft is kept, given that those before it were. f32[]."""
        return jnp.sum(self.accepted) / jnp.maximum(jnp.sum(self.tested), 1)

    @property
    def tokens_per_round(self) -> Float32[Array, ""]:
        """Tokens gained per target pass, over all rows. f32[]."""
        return jnp.sum(self.generated) / jnp.maximum(jnp.sum(self.rounds), 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """One batch in the middle of decoding. Between rounds, for every row b:

        lengths[b] - 1 - lag <= cache.lengths[b] <= lengths[b] - 1

    The cache holds precise entries of all tokens but the last, which the next verification reads.
    The target never lags. A draft model with its own cache does: if all its drafts were accepted,
    it has read neither the last of them nor the token that the target added.

    tokens: int32[B, W], prompt and output, padded.
    prompts: int32[B], tokens of the prompt, the first ones.
    lengths: int32[B], valid tokens.
    limits: int32[B], lengths at which rows end.
    finished: bool[B]; such a row changes no more.
    failed: bool[B]; such a row finished because the target's next logits were NaN or infinite.
    cache: the target's KV cache.
    keys: one random key per row, [B], or None when decoding greedily.
    draft: the drafter's own state.
    stats: counts so far.
    sampling: how each row draws, in arrays [B]; None when decoding greedily.
    stop_tokens: tokens that end a row. Static.
    vocab_size: entries of the target's vocabulary, which all levels use. Static.
    lag: tokens before the last that the cache may lack. Static.
    depth: levels above this one; 0 for the target's own state. Static.
    confidence: a row also ends with a token of smaller probability than this; None: never. For
        levels that draft. Static.
    logprobs: log-probabilities of the new tokens so far; None: nobody asked for them.
    shared: what the drafter keeps for all rows together, without an axis of rows; None: nothing.
    """

    tokens: jax.Array
    prompts: jax.Array
    lengths: jax.Array
    limits: jax.Array
    finished: jax.Array
    failed: jax.Array
    cache: KVCache
    keys: jax.Array | None
    draft: Any
    stats: Stats
    sampling: Sampling | None
    stop_tokens: tuple[int, ...] = jax.tree.static()
    vocab_size: int = jax.tree.static()
    lag: int = jax.tree.static(default=0)
    depth: int = jax.tree.static(default=0)
    confidence: float | None = jax.tree.static(default=None)
    logprobs: Logprobs | None = None
    shared: Any = None

    @property
    def last_tokens(self) -> Int32[Array, " B"]:
        """The newest token of each row, int32[B]."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)[:, 0]

    def earlier(
        self,
        following: Int32[Array, "B N"],
        ancestors: Int32[Array, "B N depth"] | None = None,
    ) -> Earlier:
        """Returns the tokens that penalties ask for, before each of a row's next places.

        following, ancestors: the drafts there, as `count_tokens` has them.
        """
        asked = self.sampling
        if asked is None:
            return NOTHING
        both = (self.lengths, following, self.vocab_size, ancestors)
        seen = counts = None
        if asked.repetition_penalty is not None:
            seen = count_tokens(self.tokens, jnp.zeros_like(self.prompts), *both) > 0
        if asked.presence_penalty is not None or asked.frequency_penalty is not None:
            counts = count_tokens(self.tokens, self.prompts, *both)
        return Earlier(seen, counts)

    def round_keys(self, purpose: int) -> Key[Array, " B"]:
        """Returns the keys of this round, [B], for purpose 0 or 1.

        A row's key depends only on its own history.
        """
        assert self.keys is not None
        rounds = self.stats.rounds.astype(jnp.uint32)
        numbers = rounds * _PURPOSES + jnp.uint32(_ROUNDS + purpose)
        return jax.vmap(jax.random.fold_in)(self.keys, numbers)

    def place_keys(self, ahead: Int32[Array, "B P"]) -> Key[Array, "B P"]:
        """Returns the keys of places so many tokens past the next one. int32[B, P] -> keys[B, P].

        A place's key is the same in whatever round, and beside whatever drafts, it is reached.
        """
        assert self.keys is not None
        places = self.stats.generated[:, None] + ahead
        return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(self.keys, places)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Tokens that a drafter proposes to follow the last one: a chain, or a tree
    (`specjax.speculation.trees`).

    tokens: int32[B, N].
    counts: int32[B], leading tokens that count; None: all.
    distributions: f32[B, N, V], the distribution that each token was drawn from, in a tree given
        its earlier siblings; None when decoding greedily or when tokens were chosen
        deterministically.
    parents: int32[B, N], parents[b, i] < i: the token that token i follows, -1 for the last one;
        None: a chain.
    least: tokens of the narrowest pass: so many always count, or fewer take as long. Static.
    allowed: uint32[B, N + 1, V / 32], one bit per token that may follow the last one, and each of
        these, the lowest bit first; None: every token may.
    verifiable: bool[B, N], False for tokens of a tree that are never accepted, and neither are
        their descendants: they only ask for `Verified.choices`; None: all may be accepted.
    """

    tokens: jax.Array
    counts: jax.Array | None = None
    distributions: jax.Array | None = None
    parents: jax.Array | None = None
    verifiable: jax.Array | None = None
    allowed: jax.Array | None = None
    least: int = jax.tree.static(default=0)

    def first(self, width: int) -> Proposal:
        """Returns the proposal of the first `width` tokens: a chain where that is none."""
        parents = self.parents if width else None
        every = (self.tokens, self.distributions, parents, self.verifiable)
        narrow = (None if each is None else each[:, :width] for each in every)
        tokens, distributions, parents, verifiable = narrow
        assert tokens is not None
        counts = None if self.counts is None else jnp.minimum(self.counts, width)
        allowed = None if self.allowed is None else self.allowed[:, : width + 1]
        return Proposal(tokens, counts, distributions, parents, verifiable, allowed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """The target's verdict on a proposal.

    begins: int32[B], the row's tokens before the round.
    proposed: int32[B, N].
    drafted: int32[B], proposals that might have been accepted.
    accepted: int32[B], leading proposals that the target kept; in a tree, those on one path.
    tested: int32[B], as in `Stats`.
    emitted: int32[B, N + 1], the row's next tokens; the first `count` are valid.
    count: int32[B], tokens gained: accepted + 1, minus those that a stop token or the limit cut
        off; 0 in finished rows.
    logits: f32[B, N + 1, V], the target's after the last token and after every proposal.
    choices: int32[B, N + 1], the most probable token at each place, also when sampling.
    finite: bool[B, N + 1], whether the logits behind each emitted token are: none of them is NaN or
        +inf, and not all are -inf.
    nodes: int32[B, N], the accepted proposals' numbers; the first `accepted` are valid; None: a
        chain.
    distributions: f32[B, N + 1, V], what every emitted token was drawn from; None when decoding
        greedily, and for the target if drafts were chosen without chance: nobody asks for it.
    logprobs: of every emitted token, N + 1 per row; None: nobody asked for them.
    """

    begins: jax.Array
    proposed: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    tested: jax.Array
    emitted: jax.Array
    count: jax.Array
    logits: jax.Array
    choices: jax.Array
    finite: jax.Array
    nodes: jax.Array | None
    distributions: jax.Array | None
    logprobs: Logprobs | None = None

    @property
    def agreed(self) -> jax.Array:
        """int32[B], the row's tokens before the round and the drafts that were kept. A drafting
        model that drafted more has read tokens behind them that the row does not have."""
        return self.begins + jnp.minimum(self.accepted, self.count)
