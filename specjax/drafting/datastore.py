"""A corpus that drafts can be looked up in: tokens, and a suffix array over them (REST, section 3).

    tokens[suffixes[i] :] <= tokens[suffixes[i + 1] :]     as far as their first ORDERED tokens

So the places where a given run of tokens occurs are neighbours in `suffixes`, and a binary search
finds the first and the last of them, for all rows of a batch at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Integer

from specjax.checks import Whole, shown
from specjax.files.arrays import read_array
from specjax.files.atomic_directory import check_replaceable, replacing
from specjax.files.json_objects import read_object

VERSION = 1
ORDERED = 16  # tokens; a power of two
_MANIFEST = "datastore.json"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Datastore:
    """Sequences of tokens, and where every run of them occurs. 8 bytes per token.

    tokens: int32[S], the sequences one after another, each followed by `vocab_size`, an id beyond
        all tokens. ORDERED more of it end the array.
    suffixes: int32[P], the places of all tokens, in the order of what begins there.
    vocab_size: entries of the vocabulary. Static.
    """

    tokens: jax.Array
    suffixes: jax.Array
    vocab_size: int = jax.tree.static()

    @classmethod
    def create(cls, sequences: Iterable[Integer[np.ndarray, " _"]], vocab_size: int) -> Datastore:
        """Makes a datastore of token sequences.

        Raises ValueError if `sequences` is empty or a token is outside the vocabulary.
        """
        arrays = [np.asarray(sequence, np.int64) for sequence in sequences]
        for array in arrays:
            outside = array[(array < 0) | (array >= vocab_size)]
            if outside.size:
                raise ValueError(
                    f"the corpus holds token {outside[0]}, outside the vocabulary of {vocab_size}"
                )
        end = np.full(1, vocab_size)
        parts = [part for array in arrays for part in (array, end)]
        tokens = np.concatenate([*parts, np.repeat(end, ORDERED)]).astype(np.int32)
        places = np.flatnonzero(tokens != vocab_size).astype(np.int32)
        if len(places) == 0:
            raise ValueError("the corpus holds no tokens; a datastore needs some")
        suffixes = places[np.argsort(_ranks(tokens)[places], kind="stable")]
        return cls(jax.device_put(tokens), jax.device_put(suffixes), vocab_size)

    def save(self, target: str | Path) -> None:
        """Writes the datastore as a directory: the whole of it, or nothing.

        Raises ValueError if `target` exists and is not a datastore.
        """
        with replacing(Path(target), check_target) as folder:
            np.save(folder / "tokens.npy", np.asarray(self.tokens))
            np.save(folder / "suffixes.npy", np.asarray(self.suffixes))
            manifest = {"version": VERSION, "vocab_size": self.vocab_size, "ordered": ORDERED}
            (folder / _MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, source: str | Path) -> Datastore:
        """Reads what `save` wrote. Raises ValueError if the directory holds something else."""
        folder = Path(source)
        if not (folder / _MANIFEST).is_file():
            raise ValueError(f"{source} is not a datastore: it has no {_MANIFEST}")
        manifest = read_object(folder / _MANIFEST)
        if (manifest.get("version"), manifest.get("ordered")) != (VERSION, ORDERED):
            raise ValueError(
                f"{source} is a datastore of version {shown(manifest.get('version'))}; this "
                f"specjax reads version {VERSION}: build it anew"
            )
        vocab_size: Any = manifest.get("vocab_size")
        Whole(1, 2**31 - 1)(f"{folder / _MANIFEST}: vocab_size", vocab_size)
        tokens = _read_integers(folder / "tokens.npy", vocab_size)
        if len(tokens) <= ORDERED or (tokens[-ORDERED:] != vocab_size).any():
            raise ValueError(f"{folder / 'tokens.npy'} does not end as a datastore's tokens do")
        suffixes = _read_integers(folder / "suffixes.npy", len(tokens) - ORDERED - 1)
        return cls(jax.device_put(tokens), jax.device_put(suffixes), vocab_size)

    def find(
        self, queries: Int32[Array, "*rows n"], lengths: Int32[Array, "*rows"]
    ) -> tuple[Int32[Array, "*rows"], Int32[Array, "*rows"]]:
        """Finds the places where runs of tokens occur.

        Args:
          queries: int32[…, n], n at most ORDERED.
          lengths: int32[…], tokens of each that count.

        Returns:
          first: int32[…], the place in `suffixes` of the first occurrence, and count: int32[…], how
          many there are; they follow one another.
        """
        first = self._bound(queries, lengths, after=False)
        return first, self._bound(queries, lengths, after=True) - first

    def read(
        self, places: Int32[Array, "*rows"], length: int
    ) -> tuple[Int32[Array, "*rows {length}"], Int32[Array, "*rows"]]:
        """The tokens from a place of `tokens` on. int32[…] -> int32[…, length], and how many of
        them come before the sequence ends, int32[…]."""
        index = jnp.minimum(places[..., None] + jnp.arange(length), self.tokens.shape[0] - 1)
        tokens = self.tokens[index]
        inside = jnp.cumsum(tokens == self.vocab_size, axis=-1) == 0
        return tokens, jnp.sum(inside, axis=-1, dtype=jnp.int32)

    def _bound(self, queries: jax.Array, lengths: jax.Array, *, after: bool) -> jax.Array:
        """The first place in `suffixes` whose text is not below the query (or is above it)."""
        size = self.suffixes.shape[0]
        offsets = jnp.arange(queries.shape[-1])

        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = (low + high) // 2
            text = self.tokens[self.suffixes[jnp.minimum(middle, size - 1)][..., None] + offsets]
            counted = offsets < lengths[..., None]
            below = _precedes(text, queries, counted, or_equal=after) & (low < high)
            return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

        none = jnp.zeros(queries.shape[:-1], jnp.int32)
        bounds: tuple[jax.Array, jax.Array] = lax.fori_loop(
            0, size.bit_length(), halve, (none, none + size)
        )
        return bounds[0]


def check_target(path: Path) -> None:
    """Raises ValueError if a path holds anything that a datastore must not replace."""
    check_replaceable(path, "a datastore", lambda found: (found / _MANIFEST).is_file())


def _read_integers(file: Path, most: int) -> np.ndarray:
    """The integers in a file. Raises ValueError unless they are int32[any] from 0 to `most`."""
    if not file.is_file():
        raise ValueError(f"{file.parent} is not a datastore: it has no {file.name}")
    array = read_array(file, np.int32, axes=1)
    outside = array[(array < 0) | (array > most)]
    if outside.size:
        raise ValueError(f"{file} must hold numbers from 0 to {most}, got {outside[0]}")
    return array


def _precedes(
    text: jax.Array, query: jax.Array, counted: jax.Array, *, or_equal: bool
) -> jax.Array:
    """Whether a run of tokens comes before another, by those that count. [..., n] -> bool[...]."""
    differ = (text != query) & counted
    at = jnp.argmax(differ, axis=-1)[..., None]
    less = jnp.take_along_axis(text, at, -1) < jnp.take_along_axis(query, at, -1)
    return jnp.where(jnp.any(differ, axis=-1), less[..., 0], or_equal)


def _ranks(tokens: np.ndarray) -> np.ndarray:
    """The rank of every suffix by its first ORDERED tokens; equal ones share it. int64[S].

    Prefix doubling (Manber and Myers 1990): ranks by n tokens give ranks by 2n.
    """
    ranks = tokens.astype(np.int64)
    span = 1
    while span < ORDERED:
        last = int(np.max(ranks))
        later = np.concatenate([ranks[span:], np.full(min(span, len(ranks)), last)])
        _, ranks = np.unique(ranks * (last + 1) + later[: len(ranks)], return_inverse=True)
        span *= 2
    return ranks
