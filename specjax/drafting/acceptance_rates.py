"""How often drafts are kept, by row, and what more of them promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

_WEIGHT = 4.0  # drafts that a prior counts for
_MEMORY = 32.0  # drafts, roughly, over which acceptance is averaged
_ROUNDS = 2.0  # rounds that a prior counts for
_RECENT = 16.0  # rounds, roughly, over which yields are averaged


class Guess(NamedTuple):
    """Tokens that may come next.

    tokens: int32[B, N].
    kinds: int32[B, N], the kind of draft that each is.
    counts: int32[B], leading tokens that count.
    """

    tokens: jax.Array
    kinds: jax.Array
    counts: jax.Array


class Rates(NamedTuple):
    """Recent drafts of K kinds, f32[B, K] each: those that were kept, and that were decided on."""

    kept: jax.Array
    tested: jax.Array

    @classmethod
    def create(cls, rows: int, priors: Sequence[float]) -> Rates:
        """The rates before any draft, one per kind."""
        tested = jnp.full((rows, len(priors)), _WEIGHT, jnp.float32)
        return cls(tested * jnp.array(priors), tested)

    def of(self, kinds: Int32[Array, "B N"]) -> Float32[Array, "B N"]:
        """The shares of drafts of these kinds that were kept. int32[B, N] -> f32[B, N]."""
        return jnp.take_along_axis(self.kept / self.tested, kinds, axis=1)

    def gains(self, guess: Guess) -> Float32[Array, "B _"]:
        """Tokens that a round of 0 … N of the guess's tokens is expected to gain, the target's own
        included (Leviathan et al. 2023, equation 1). f32[B, N + 1].

        Tokens beyond its counts gain nothing.
        """
        meant = jnp.arange(guess.tokens.shape[1]) < guess.counts[:, None]
        kept = jnp.cumprod(jnp.where(meant, self.of(guess.kinds), 0), axis=1)
        return 1 + jnp.pad(jnp.cumsum(kept, axis=1), ((0, 0), (1, 0)))

    def judged(self, guess: Guess, came: Int32[Array, "B N"], count: Int32[Array, " B"]) -> Rates:
        """The rates after the tokens that came: int32[B, N], of which the first count: int32[B]
        are the row's next ones. A guess is decided up to its first wrong token."""
        place = jnp.arange(came.shape[1])
        decided = place < jnp.minimum(guess.counts, count)[:, None]
        right = jnp.cumprod((guess.tokens == came) & decided, axis=1, dtype=jnp.float32)
        before = jnp.pad(right[:, :-1], ((0, 0), (1, 0)), constant_values=1)
        return self.after(guess.kinds, decided * before, right)

    def after(
        self,
        kinds: Int32[Array, "B N"],
        tested: Float32[Array, "B N"],
        kept: Float32[Array, "B N"],
    ) -> Rates:
        """The rates after drafts of these kinds, [B, N] each."""
        each = jax.nn.one_hot(kinds, self.kept.shape[1])
        tested, kept = (jnp.sum(each * count[..., None], axis=1) for count in (tested, kept))
        fade = (1 - 1 / _MEMORY) ** tested
        return Rates(self.kept * fade + kept, self.tested * fade + tested)


class Yields(NamedTuple):
    """A row's recent rounds of one drafter, f32[B] each: how many, the drafts that were kept, and
    the time that they took, in plain passes."""

    rounds: jax.Array
    kept: jax.Array
    took: jax.Array

    @classmethod
    def create(
        cls, rows: int, kept: float | Float32[Array, ""], took: float | Float32[Array, ""]
    ) -> Yields:
        """As if a few rounds had kept and taken so much each."""
        return cls(*(jnp.full(rows, _ROUNDS * each, jnp.float32) for each in (1.0, kept, took)))

    def a_round(self) -> tuple[Float32[Array, " B"], Float32[Array, " B"]]:
        """The drafts that a round keeps, and the time that it takes. f32[B] each."""
        return self.kept / self.rounds, self.took / self.rounds

    def after(
        self,
        drafted: Bool[Array, " B"],
        kept: Int32[Array, " B"],
        took: Float32[Array, ""],
        prior: Yields,
    ) -> Yields:
        """The yields after a round. Rows that did not draft, bool[B], come a little closer to what
        was assumed before the first."""

        def moved(past: jax.Array, now: jax.Array | float, usual: jax.Array) -> jax.Array:
            idle = usual + (past - usual) * (1 - 1 / _MEMORY)
            return jnp.where(drafted, past * (1 - 1 / _RECENT) + now, idle)

        return Yields(
            moved(self.rounds, 1.0, prior.rounds),
            moved(self.kept, kept.astype(jnp.float32), prior.kept),
            moved(self.took, took, prior.took),
        )
