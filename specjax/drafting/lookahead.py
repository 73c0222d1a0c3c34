"""Lookahead decoding: n-grams from a window of Jacobi iterations (Fu et al. 2024)."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Int32

from specjax.drafting.ngram_tables import NGramTable
from specjax.drafting.window import WindowDrafter
from specjax.speculation.state import DecodeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookahead(WindowDrafter):
    """Guesses the n-grams that begin with the last token, the newest first.

    ngram: N, tokens per n-gram, at least 2; a guess has N - 1. The paper's levels.
    window: W, columns of the window, which are part of every pass.
    guesses: G, n-grams tried per round.
    capacity: n-grams kept per row, in 4 · capacity · (N + 1) bytes.
    text: keep n-grams of prompt and output too.
    seed: for the window's first tokens, which are drawn from the prompt.

    Raises ValueError where a field is out of its range.
    """

    ngram: int = jax.tree.static(default=5)
    window: int = jax.tree.static(default=7)
    guesses: int = jax.tree.static(default=7)
    capacity: int = jax.tree.static(default=8192)
    text: bool = jax.tree.static(default=True)
    seed: int = jax.tree.static(default=0)

    def guess(
        self, table: NGramTable, state: DecodeState
    ) -> tuple[Int32[Array, "B C L"], Int32[Array, "B C"]]:
        return table.continuations(state.last_tokens, self.guesses)
