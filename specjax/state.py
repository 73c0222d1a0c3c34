"""What one row of decoding knows: the state of the loop, and what passes between its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kv_cache import KVCache
from specjax.sampling import Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts per row, int32[B] each.

    rounds: draft-verify rounds, one target pass each.
    drafted: tokens proposed.
    tested: of these, the ones the target decided on: all up to the first rejected one.
    accepted: of these, the ones it agreed with, whether or not a limit then cut them off.
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
    def acceptance_rate(self) -> jax.Array:
        """Accepted over drafted tokens, all rows together (QSpec section 4.4). f32[]."""
        return jnp.sum(self.accepted) / jnp.maximum(jnp.sum(self.drafted), 1)

    @property
    def token_acceptance(self) -> jax.Array:
        """Probability that a draft is kept given that those before it were. f32[]."""
        return jnp.sum(self.accepted) / jnp.maximum(jnp.sum(self.tested), 1)

    @property
    def tokens_per_round(self) -> jax.Array:
        """Tokens gained per target pass, all rows together. f32[]."""
        return jnp.sum(self.generated) / jnp.maximum(jnp.sum(self.rounds), 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """One batch in the middle of decoding. Between rounds, for every row b:

        cache.lengths[b] = lengths[b] - 1

    The cache holds precise entries of all tokens but the last, which the next verification reads.

    tokens: int32[B, W], prompt and output, padded.
    lengths: int32[B], valid tokens.
    limits: int32[B], lengths at which rows end.
    finished: bool[B]; such a row changes no more.
    cache: the target's KV cache.
    keys: one random key per row, [B], or None when decoding greedily.
    draft: whatever the drafter keeps.
    stats: counts so far.
    sampling, stop_tokens: static.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    finished: jax.Array
    cache: KVCache
    keys: jax.Array | None
    draft: Any
    stats: Stats
    sampling: Sampling | None = dataclasses.field(metadata={"static": True})
    stop_tokens: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def last_tokens(self) -> jax.Array:
        """The newest token of each row, int32[B]."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)[:, 0]

    def round_keys(self, purpose: int) -> jax.Array:
        """Keys of this round, [B]: a row's depend on its own history alone."""
        assert self.keys is not None
        fold = jax.vmap(jax.random.fold_in)
        return fold(fold(self.keys, self.stats.rounds), jnp.full_like(self.stats.rounds, purpose))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Tokens that a drafter proposes to follow the last one, in order.

    tokens: int32[B, N].
    distributions: f32[B, N, V], what each was drawn from; None when decoding greedily.
    """

    tokens: jax.Array
    distributions: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What a target pass made of a proposal.

    proposed: int32[B, N].
    accepted: int32[B], leading proposals that the target kept.
    emitted: int32[B, N + 1], the row's next tokens; the first `count` are valid.
    count: int32[B], tokens gained: accepted + 1, less what a stop token or the limit cut off; 0 in
        finished rows.
    """

    proposed: jax.Array
    accepted: jax.Array
    emitted: jax.Array
    count: jax.Array
