"""Lookahead decoding: n-grams from a window of Jacobi iterations (Fu et al. 2024)."""

from __future__ import annotations

import dataclasses

import jax

from specjax.drafting.ngram_tables import NGramTable
from specjax.drafting.window import WindowDrafter
from specjax.speculation.state import DecodeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookahead(WindowDrafter):
    """Guesses the n-grams that begin with the last token, the newest first.

    ngram: N, tokens per n-gram, at least 2; a guess has N - 1. The paper's levels.
    window: W, columns of the window, which ride along in every pass.
    guesses: G, n-grams that are tried per round.
    capacity: n-grams that are remembered per row, in 4 · capacity · (N + 1) bytes.
    text: whether n-grams of prompt and output are remembered too.
    seed: for the window's first tokens, drawn from the prompt's.

    Raises ValueError where a field is out of its range.
    """

    ngram: int = jax.tree.static(default=5)
    window: int = jax.tree.static(default=7)
    guesses: int = jax.tree.static(default=7)
    capacity: int = jax.tree.static(default=8192)
    text: bool = jax.tree.static(default=True)
    seed: int = jax.tree.static(default=0)

    def guess(self, table: NGramTable, state: DecodeState) -> tuple[jax.Array, jax.Array]:
        return table.continuations(state.last_tokens, self.guesses)
