"""The window of Lookahead and SPECTRA, with which a model makes guesses for itself.

A window of W columns, each N - 1 tokens deep, runs ahead of the text. It is part of every verifying
pass, which predicts one more token of each column. A column with its prediction is an n-gram that
the model itself produced, and goes into a dictionary. Guesses come from that dictionary. The window
then moves on: its oldest tokens leave, and the predictions enter.

A token of the window sees the text, the first tokens of the columns before its own, and its own
column up to itself (Fu et al. 2024, section 3.3). As a tree, entry f of the window, at level f // W
and column f % W, is node f - 1, and entry 0 is the last token of the text:

    parent of entry f  =  entry f - 1  in the first level,  entry f - W  below it
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from specjax.checks import check_flag, check_integer, check_seed
from specjax.drafting.ngram_tables import CHUNK, NGramTable, index_text
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal, Verified
from specjax.speculation.trees import from_sequences

MATCHES = 4  # n-grams examined per guess: many share a beginning


class WindowState(NamedTuple):
    """table: the n-grams seen so far; indexed: int32[B], tokens of the text that are in it.

    window: int32[B, (N - 1) · W], level by level.
    rounds: int32[B].
    """

    table: NGramTable
    indexed: jax.Array
    window: jax.Array
    rounds: jax.Array


class WindowDrafter(Drafter):
    """Base of the drafters that have a window. Their dataclasses hold these fields:

    ngram: N, tokens per n-gram, at least 2; a guess has N - 1.
    window: W, columns of the window.
    guesses: G; a round's guesses have up to G · (N - 1) tokens, shared tokens counted once.
    capacity: n-grams kept per row, in 4 · capacity · (N + 1) bytes.
    text: keep n-grams of prompt and output too.
    seed: for the window's first tokens, which are drawn from the prompt.
    """

    ngram: int
    window: int
    guesses: int
    capacity: int
    text: bool
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("ngram", 2), ("window", 1), ("guesses", 1)):
            if check_integer(name, getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        least = max(2 * CHUNK, 2 * self.window, MATCHES * self.guesses)
        if check_integer("capacity", self.capacity) < least:
            raise ValueError(
                f"capacity must be at least {least} for window={self.window} and "
                f"guesses={self.guesses}, got {self.capacity}"
            )
        check_flag("text", self.text)
        check_seed("seed", self.seed)

    @property
    def draft_length(self) -> int:
        return self.riding + self.guesses * (self.ngram - 1)

    @property
    def riding(self) -> int:
        """The number of window tokens that a pass reads; the first is the text's last token."""
        return (self.ngram - 1) * self.window - 1

    def init(self, params: Params, state: DecodeState, width: int) -> WindowState:
        rows = state.tokens.shape[0]
        draw = jax.random.uniform(jax.random.key(self.seed), (self.riding + 1,))
        places = (draw * state.lengths[:, None]).astype(jnp.int32)
        return WindowState(
            NGramTable.create(rows, self.ngram, self.capacity),
            jnp.zeros(rows, jnp.int32),
            jnp.take_along_axis(state.tokens, places, axis=1),
            jnp.zeros(rows, jnp.int32),
        )

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        draft: WindowState = state.draft
        table = draft.table
        if self.text:
            # The last token is always new: a level's own may have been another.
            first = jnp.minimum(draft.indexed, state.lengths - 1)
            table = index_text(table, state.tokens, first, state.lengths)
        window = draft.window.at[:, 0].set(state.last_tokens)
        guesses, lengths = self.guess(table, state)
        tree = from_sequences(guesses, lengths, self.guesses * (self.ngram - 1))
        proposal = _ride_along(window[:, 1:], self.window, *tree)
        draft = WindowState(table, state.lengths, window, draft.rounds)
        return proposal, dataclasses.replace(state, draft=draft)

    def observe(self, draft: WindowState, verified: Verified) -> WindowState:
        predicted = self.predict(draft, verified)
        window = jnp.concatenate((draft.window, predicted), axis=1)
        ngrams = window.reshape(window.shape[0], self.ngram, self.window).transpose(0, 2, 1)
        running = verified.count > 0
        return WindowState(
            draft.table.insert(ngrams, jnp.broadcast_to(running[:, None], ngrams.shape[:2])),
            draft.indexed,
            jnp.where(running[:, None], window[:, self.window :], draft.window),
            draft.rounds + running,
        )

    @abstractmethod
    def guess(
        self, table: NGramTable, state: DecodeState
    ) -> tuple[Int32[Array, "B C L"], Int32[Array, "B C"]]:
        """Returns continuations of the text, the best first: int32[B, C, L] and lengths, int32[B,
        C]."""

    def predict(self, draft: WindowState, verified: Verified) -> Int32[Array, "B W"]:
        """Returns the next token of every column, int32[B, W]."""
        return verified.choices[:, self.riding + 1 - self.window : self.riding + 1]


def _ride_along(
    riding: jax.Array, columns: int, tokens: jax.Array, parents: jax.Array, counts: jax.Array
) -> Proposal:
    """Puts a tree of guesses behind window tokens, which only ask for a prediction.

    riding: int32[B, R]; columns: W; tokens, parents, counts: the guesses.
    """
    rows, first = riding.shape
    entry = np.arange(1, first + 1)
    own = jnp.asarray(np.where(entry < columns, entry - 2, entry - columns - 1), jnp.int32)
    verifiable = jnp.arange(first + tokens.shape[1]) >= first
    return Proposal(
        tokens=jnp.concatenate((riding, tokens), axis=1),
        counts=first + counts,
        parents=jnp.concatenate(
            (jnp.tile(own, (rows, 1)), jnp.where(parents < 0, -1, parents + first)), axis=1
        ),
        verifiable=jnp.tile(verifiable, (rows, 1)),
        least=first,
    )
