"""Dictionaries of n-grams on the device, from which Lookahead and SPECTRA guess.

A dictionary is a list of the newest n-grams. A look-up compares the key with all of them at once:
a few vector instructions per thousand entries, the same for every row of a batch. Nothing is hashed
and nothing collides. Every run of tokens inside an n-gram is a key without being stored again, so
SPECTRA's sub-n-grams cost no memory.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

CHUNK = 16  # places of a text that are indexed at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGramTable:
    """The last M distinct n-grams of every row: 4 · M · (N + 1) bytes per row.

    An n-gram that is inserted again becomes the newest. The oldest are dropped when there is no
    room.

    ngrams: int32[B, N, M]; -1 means no token, and only the first tokens of an n-gram may be -1.
    stamps: int32[B, M], the clock when each was last inserted; 0: never.
    clock: int32[B], insertions so far.
    """

    ngrams: jax.Array
    stamps: jax.Array
    clock: jax.Array

    @classmethod
    def create(cls, rows: int, n: int, capacity: int) -> NGramTable:
        """Makes room for M = `capacity` n-grams of N = `n` tokens per row."""
        return cls(
            jnp.full((rows, n, capacity), -1, jnp.int32),
            jnp.zeros((rows, capacity), jnp.int32),
            jnp.zeros(rows, jnp.int32),
        )

    def insert(self, ngrams: Int32[Array, "B I N"], valid: Bool[Array, "B I"]) -> NGramTable:
        """Inserts n-grams; the last one becomes the newest.

        ngrams: int32[B, I, N], with I at most M / 2; valid: bool[B, I], the ones to insert.
        """
        assert 2 * ngrams.shape[1] <= self.stamps.shape[1]
        return jax.vmap(_insert)(self, ngrams, valid)

    def continuations(
        self, tokens: Int32[Array, " B"], most: int, *, inside: bool = False
    ) -> tuple[Int32[Array, "B {most} _"], Int32[Array, "B {most}"]]:
        """Looks up the tokens that followed a token: the forward dictionary.

        Args:
          tokens: int32[B].
          most: how many continuations to return, C.
          inside: take n-grams that hold the token between their first and last one, instead of
            those that begin with it. If one holds it twice, the longer continuation comes first.

        Returns:
          int32[B, C, N - 1], the newest first, and their lengths, int32[B, C]; 0: none.
        """
        n = self.ngrams.shape[1]
        places = range(1, n - 1) if inside else range(1)
        return jax.vmap(partial(_continuations, most=most, places=places))(self, tokens)

    def next_token(
        self, context: Int32[Array, "B _"], *, parts: bool = True
    ) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
        """Looks up the token after the longest end of a context: the backward dictionary, with
        back-off.

        Among equally long ends the newest n-gram wins, and the last place within it.

        Args:
          context: int32[B, N - 1], the last tokens, -1 before the beginning of a text.
          parts: whether any run of tokens in an n-gram is a key; False: all but its last token.

        Returns:
          int32[B], and bool[B]: whether anything was found.
        """
        return jax.vmap(partial(_next_token, parts=parts))(self, context)

    def keys(self, vocab_size: int, *, parts: bool = True) -> Bool[Array, "B {vocab_size}"]:
        """Returns the tokens that have a continuation, bool[B, V]; without parts: that begin an
        n-gram."""
        held = self.ngrams[:, : -1 if parts else 1].reshape(self.stamps.shape[0], -1)
        held = jnp.where(held < 0, vocab_size, held)
        known = jnp.zeros((held.shape[0], vocab_size), bool)
        return known.at[jnp.arange(held.shape[0])[:, None], held].set(True, mode="drop")


def index_text(
    table: NGramTable,
    tokens: Int32[Array, "B W"],
    first: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
) -> NGramTable:
    """Inserts the n-grams of a text that end at places first … lengths - 1.

    tokens: int32[B, W]; first, lengths: int32[B].
    """
    n = table.ngrams.shape[1]

    def insert_chunk(carry: tuple[jax.Array, NGramTable]) -> tuple[jax.Array, NGramTable]:
        start, table = carry
        places = start[:, None] + jnp.arange(CHUNK)
        valid = (places < lengths[:, None]) & (places > 0)  # one token alone says nothing
        return start + CHUNK, table.insert(last_tokens(tokens, places + 1, n), valid)

    return lax.while_loop(lambda carry: jnp.any(carry[0] < lengths), insert_chunk, (first, table))[
        1
    ]


def last_tokens(
    tokens: Int32[Array, "B W"], lengths: Int32[Array, " B *places"], n: int
) -> Int32[Array, "B *places {n}"]:
    """Returns the last n of the first `lengths` tokens, -1 before the beginning.

    int32[B, W], int32[B, …] -> int32[B, …, n].
    """
    places = lengths[..., None] + jnp.arange(-n, 0)
    rows = jnp.arange(tokens.shape[0]).reshape(-1, *(1,) * (places.ndim - 1))
    return jnp.where(places < 0, -1, tokens[rows, jnp.clip(places, 0, tokens.shape[1] - 1)])


def _insert(table: NGramTable, ngrams: jax.Array, valid: jax.Array) -> NGramTable:
    """`NGramTable.insert` for one row."""
    held, stamps, clock = table.ngrams, table.stamps, table.clock
    index = jnp.arange(ngrams.shape[0])
    again = jnp.all(ngrams[:, None] == ngrams, axis=2) & valid & (index > index[:, None])
    valid &= ~jnp.any(again, axis=1)  # the last of equal ones counts
    new_stamps = jnp.where(valid, clock + 1 + index, 0)
    equal = jnp.broadcast_to(valid[:, None], (*valid.shape, *stamps.shape))
    for place, tokens in enumerate(held):
        equal &= ngrams[:, place, None] == tokens
    stamps = jnp.maximum(stamps, jnp.max(jnp.where(equal, new_stamps[:, None], 0), axis=0))
    missing = valid & ~jnp.any(equal, axis=1)
    oldest = _newest(jnp.negative(_age(stamps, clock)), ngrams.shape[0])
    slots = jnp.where(missing, oldest[jnp.cumsum(missing) - 1], stamps.shape[0])
    return NGramTable(
        held.at[:, slots].set(ngrams.T, mode="drop"),
        stamps.at[slots].set(new_stamps, mode="drop"),
        clock + ngrams.shape[0],
    )


def _continuations(
    table: NGramTable, token: jax.Array, most: int, places: range
) -> tuple[jax.Array, jax.Array]:
    """`NGramTable.continuations` for one row, of a token at these places."""
    held = table.ngrams
    n, capacity = held.shape
    found = held[places.start : places.stop] == token
    age = jnp.where(found, _age(table.stamps, table.clock), -jnp.inf).reshape(-1)
    chosen = _newest(age, most)
    place, entry = places.start + chosen // capacity, chosen % capacity
    follow = place[:, None] + 1 + jnp.arange(n - 1)
    tokens = held[jnp.minimum(follow, n - 1), entry[:, None]]
    return tokens, jnp.where(jnp.isfinite(age[chosen]), n - 1 - place, 0)


def _next_token(table: NGramTable, context: jax.Array, parts: bool) -> tuple[jax.Array, jax.Array]:
    """`NGramTable.next_token` for one row."""
    held = table.ngrams
    n = held.shape[0]
    best = jnp.zeros(held.shape[1], jnp.int32)  # of every n-gram: how long a context it continues
    token = jnp.zeros_like(best)
    for place in range(1 if parts else n - 1, n):
        run, longest = jnp.bool_(True), jnp.zeros_like(best)
        for back in range(1, place + 1):
            run &= (held[place - back] == context[-back]) & (context[-back] >= 0)
            longest += run
        if not parts:
            longest = jnp.where(run, longest, 0)
        token = jnp.where(longest >= jnp.maximum(best, 1), held[place], token)
        best = jnp.maximum(best, longest)
    newest = jnp.argmax(jnp.where(best == jnp.max(best), table.stamps, -1))
    return token[newest], best[newest] > 0


def _age(stamps: jax.Array, clock: jax.Array) -> jax.Array:
    """Returns the age of entries: 0 for the newest, less for older ones, in float32, which sorts
    fast.

    Exact for the last 2^24 insertions, and in order beyond.
    """
    return (stamps - clock).astype(jnp.float32)


def _newest(age: jax.Array, count: int) -> jax.Array:
    """Returns the places of the largest values, the first of equals first. [M] -> [count]."""
    return lax.top_k(age, count)[1]
