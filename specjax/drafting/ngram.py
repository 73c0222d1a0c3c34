"""ANPD: an n-gram model of the text so far drafts for it (Ou et al. 2024).

The model counts the prompt and every accepted token. It proposes the token that most often
followed the same context, and backs off to a shorter context if the longer one is new (the paper's
multi-level n-grams).

Counts are kept at the places of the text instead of in a table by token: every place holds how
often the n-gram that ends there had occurred so far. The last occurrence of an n-gram therefore
holds its count, and the most frequent successor is a maximum over the places where the context
occurs.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_integer
from specjax.drafting.ngram_tables import last_tokens
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal

_CHUNK = 16  # places that are counted at a time


class NGramState(NamedTuple):
    """4 · W · N bytes per row, where a text has room for W tokens.

    tokens: int32[B, W], the text that was counted.
    lengths: int32[B], tokens counted.
    counts: int32[B, N - 1, W], occurrences so far of the bigram, trigram, … that ends at a place.
    """

    tokens: jax.Array
    lengths: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """Proposes the tokens that most often followed, one after another.

    Among equally frequent tokens the one seen last wins. A draft ends when even the last token
    alone is new.

    draft_length: the most tokens per draft.
    ngram: N, tokens of the longest n-grams, at least 2; contexts have up to N - 1.

    Raises ValueError where a field is out of its range.
    """

    draft_length: int = jax.tree.static(default=10)
    ngram: int = jax.tree.static(default=3)

    def __post_init__(self) -> None:
        for name, least in (("draft_length", 1), ("ngram", 2)):
            if check_integer(name, getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def init(self, params: Params, state: DecodeState, width: int) -> NGramState:
        rows, room = state.tokens.shape
        empty = NGramState(
            jnp.full((rows, room), -1, jnp.int32),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros((rows, self.ngram - 1, room), jnp.int32),
        )
        return _count(empty, state)

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        draft = _count(state.draft, state)
        context = last_tokens(state.tokens, state.lengths, self.ngram - 1)

        def extend(context: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            token, found = jax.vmap(_most_frequent)(draft, context)
            return jnp.concatenate((context[:, 1:], token[:, None]), axis=1), (token, found)

        _, (tokens, found) = lax.scan(extend, context, length=self.draft_length)
        counts = jnp.sum(jnp.cumprod(found, axis=0, dtype=jnp.int32), axis=0)
        proposal = Proposal(tokens.T, counts)
        return proposal, dataclasses.replace(state, draft=draft)


def _count(draft: NGramState, state: DecodeState) -> NGramState:
    """Updates the counts from the first token on that is new or differs from the counted one.

    (Tokens differ if a level's own tokens were rejected since.)
    """
    known = jnp.arange(state.tokens.shape[1]) < draft.lengths[:, None]
    changed = (draft.tokens != state.tokens) | ~known
    counted = jnp.where(jnp.any(changed, axis=1), jnp.argmax(changed, axis=1), draft.lengths)
    counted = jnp.minimum(counted, state.lengths)

    def count_chunk(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, counts = carry
        places = start[:, None] + jnp.arange(_CHUNK)
        new = jax.vmap(_occurrences, (0, 0, None))(state.tokens, places, counts.shape[1])
        rows = jnp.arange(places.shape[0])[:, None]
        counts = counts.at[rows, :, places].set(new, mode="drop")
        return start + _CHUNK, counts

    _, counts = lax.while_loop(
        lambda carry: jnp.any(carry[0] < state.lengths), count_chunk, (counted, draft.counts)
    )
    return NGramState(state.tokens, state.lengths, counts)


def _occurrences(tokens: jax.Array, places: jax.Array, levels: int) -> jax.Array:
    """Counts the n-grams that end at `places`, up to there. int32[W], [I] -> int32[I, levels]."""
    width = tokens.shape[0]
    same = jnp.arange(width) <= places[:, None]
    counts = []
    for back in range(levels + 1):
        there = jnp.pad(tokens, (back, 0), constant_values=-1)[:width]
        same &= there == there[jnp.minimum(places, width - 1), None]
        if back:
            counts.append(jnp.sum(same, axis=1, dtype=jnp.int32))
    return jnp.stack(counts, axis=1)


def _most_frequent(draft: NGramState, context: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the most frequent token after a row's context, int32[N - 1], and whether there was
    any."""
    width = draft.tokens.shape[0]
    places = jnp.arange(width)
    same = places < draft.lengths
    token, found = jnp.int32(0), jnp.bool_(False)
    for level, counts in enumerate(draft.counts):
        there = jnp.pad(draft.tokens, (level + 1, 0), constant_values=-1)[:width]
        same &= (there == context[-1 - level]) & (there >= 0)
        score = jnp.where(same, counts, 0)
        best = width - 1 - jnp.argmax(score[::-1])  # the last of the most frequent
        token = jnp.where(score[best] > 0, draft.tokens[best], token)
        found |= score[best] > 0
    return token, found
