"""SPECTRA-CORE: guesses from two dictionaries that the model fills for itself (Le et al. 2025).

Both dictionaries are one table of n-grams, read in two ways. Forward: the continuations of the last
token anywhere in an n-gram; many guesses, fast. Backward: one guess, token by token, each from the
longest end of the text and the guess so far that an n-gram continues; few tokens, good ones.
`Combined` fills the rest of the budget from a corpus.

The paper leaves these choices open:
- The candidates are a window like Lookahead's, drawn from the prompt at first.
- The backward guess comes before the forward ones, so that the budget never cuts it.
- Among forward guesses, n-grams that begin with the last token come before n-grams that hold it.
  The text and the window advance by a few tokens, so most of the latter begin one of the former.
- N-grams of the text are kept like the window's, and the oldest are dropped first.
- The backward guess may exceed N - 1 tokens, unlike the paper's: a text that repeats itself then
  gains that many more tokens at once.
- The budget is one of tokens, of which guesses share those that they have in common.

`Spectra.paper` decides these as the paper does, where it says how.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypedDict, Unpack, get_args

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_flag, check_integer
from specjax.drafting.ngram_tables import NGramTable, last_tokens
from specjax.drafting.window import MATCHES, WindowDrafter, WindowState
from specjax.speculation.sampling import greedy
from specjax.speculation.state import DecodeState, Verified

Budget = Literal["tokens", "guesses"]


class _Options(TypedDict, total=False):
    """The fields of `Spectra`."""

    ngram: int
    window: int
    guesses: int
    refine: float
    capacity: int
    text: bool
    forward: bool
    backward: bool
    parts: bool
    backward_length: int
    budget: Budget
    seed: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spectra(WindowDrafter):
    """Guesses in both directions, with candidates that keep filling the dictionaries.

    ngram: N, tokens per n-gram, at least 2; a forward guess has up to N - 1.
    window: W, candidates, which are part of every pass.
    guesses: G, the budget of a round.
    budget: what G limits. "tokens": guesses have up to G · (N - 1) tokens, shared tokens counted
        once, and the backward guess comes first. "guesses": there are up to G guesses, the forward
        ones first (the paper, algorithm 1).
    backward_length: the most tokens of the backward guess (the paper: N - 1).
    refine: τ in 0 … 1, how often a candidate continues with the most probable token that does not
        begin an n-gram yet, instead of the most probable one.
    capacity: n-grams kept per row, in 4 · capacity · (N + 1) bytes.
    text: keep n-grams of prompt and output too.
    forward, backward, parts: the paper's ablations: without the forward dictionary, without the
        backward dictionary, without the n-grams inside an n-gram.
    seed: for the candidates' first tokens, which are drawn from the prompt, and for τ.

    Raises ValueError where a field is out of its range.
    """

    ngram: int = jax.tree.static(default=5)
    window: int = jax.tree.static(default=15)
    guesses: int = jax.tree.static(default=15)
    refine: float = jax.tree.static(default=0.1)
    capacity: int = jax.tree.static(default=8192)
    text: bool = jax.tree.static(default=True)
    forward: bool = jax.tree.static(default=True)
    backward: bool = jax.tree.static(default=True)
    parts: bool = jax.tree.static(default=True)
    backward_length: int = jax.tree.static(default=10)
    budget: Budget = jax.tree.static(default="tokens")
    seed: int = jax.tree.static(default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.refine, int | float) and 0 <= self.refine <= 1):
            raise ValueError(f"refine must be in 0 … 1, got {self.refine!r}")
        if check_integer("backward_length", self.backward_length) < 1:
            raise ValueError(f"backward_length must be at least 1, got {self.backward_length}")
        if self.budget not in get_args(Budget):
            raise ValueError(f"budget must be tokens or guesses, got {self.budget!r}")
        for name in ("forward", "backward", "parts"):
            check_flag(name, getattr(self, name))
        if not (self.forward or self.backward):
            raise ValueError("forward and backward are both False: nothing is left to guess from")

    @classmethod
    def paper(cls, **options: Unpack[_Options]) -> Spectra:
        """SPECTRA-CORE as the paper has it.

        The dictionaries hold the window's n-grams alone, the backward guess has up to N - 1 tokens,
        and G limits the guesses.

        Args:
          options: fields with other values than the paper's.

        Returns:
          The drafter.

        Raises:
          ValueError: a field is out of its range.
        """
        ngram = check_integer("ngram", options.get("ngram", 5))
        own: _Options = {
            "text": False,
            "backward_length": max(ngram - 1, 1),
            "budget": "guesses",
        }
        return cls(**own | options)

    def guess(self, table: NGramTable, state: DecodeState) -> tuple[jax.Array, jax.Array]:
        found = self._forward_guesses(table, state)
        if self.backward:
            found.insert(
                0 if self.budget == "tokens" else len(found), self._backward_guess(table, state)
            )
        widest = max(sequences.shape[2] for sequences, _ in found)
        padded = [
            jnp.pad(sequences, ((0, 0), (0, 0), (0, widest - sequences.shape[2])))
            for sequences, _ in found
        ]
        lengths = jnp.concatenate([each for _, each in found], axis=1)
        if self.budget == "guesses":
            lengths = jnp.where(jnp.cumsum(lengths > 0, axis=1) <= self.guesses, lengths, 0)
        return jnp.concatenate(padded, axis=1), lengths

    def predict(self, draft: WindowState, verified: Verified) -> jax.Array:
        likely = super().predict(draft, verified)
        if not (self.refine and self.forward):
            return likely
        known = draft.table.keys(verified.logits.shape[-1], parts=self.parts)
        refined = self.draws(draft.rounds) < self.refine
        refined &= ~jnp.all(known, axis=1, keepdims=True)
        places = jnp.flatnonzero(refined, size=refined.size, fill_value=0)

        def refine_one(i: jax.Array, tokens: jax.Array) -> jax.Array:
            row, column = jnp.divmod(places[i], self.window)
            logits = verified.logits[row, self.riding + 1 - self.window + column]
            unseen = greedy(jnp.where(known[row], -jnp.inf, logits))
            return tokens.at[row, column].set(unseen)

        # One after another: they are few, and each is a pass over the vocabulary.
        tokens: jax.Array = lax.fori_loop(0, jnp.sum(refined), refine_one, likely)
        return tokens

    def draws(self, rounds: jax.Array) -> jax.Array:
        """Returns uniform numbers, f32[B, W], which depend only on a row's own rounds."""
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.seed), rounds)
        return jax.vmap(lambda key: jax.random.uniform(key, (self.window,)))(keys)

    def _forward_guesses(
        self, table: NGramTable, state: DecodeState
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Continuations of the last token, as for `guess`: of n-grams that begin with it, then of
        those that hold it."""
        found = []
        if self.forward:
            found.append(table.continuations(state.last_tokens, MATCHES * self.guesses))
        if self.forward and self.parts and self.ngram > 2:
            found.append(table.continuations(state.last_tokens, self.guesses, inside=True))
        return found

    def _backward_guess(self, table: NGramTable, state: DecodeState) -> tuple[jax.Array, jax.Array]:
        """Makes one guess as long as n-grams continue it: int32[B, 1, backward_length] and
        int32[B, 1]."""
        context = last_tokens(state.tokens, state.lengths, self.ngram - 1)

        def extend(context: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            token, found = table.next_token(context, parts=self.parts)
            return jnp.concatenate((context[:, 1:], token[:, None]), axis=1), (token, found)

        _, (tokens, found) = lax.scan(extend, context, length=self.backward_length)
        length = jnp.sum(jnp.cumprod(found, axis=0, dtype=jnp.int32), axis=0)
        return tokens.T[:, None], length[:, None]
