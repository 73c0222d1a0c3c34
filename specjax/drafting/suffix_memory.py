"""A memory of texts that all rows share: the token that followed the last n, for several n.

Drafts come from the row's own text, the other rows', earlier outputs, and texts that were read in
before (SuffixDecoding, Oliaro et al. 2024). A suffix tree grows with its texts. Here a table of one
fixed size takes its place, as in a branch predictor (TAGE, Seznec and Michaud 2006): the last 1,
2, 4, 8 and 16 tokens each have an entry, found by their hash.

    entries[i, slot(h)] = h, token, count     h: hash of the last CONTEXTS[i] tokens

The longest context that is known proposes the next token. The draft then belongs to the context,
which proposes the token after it. A token that comes as its entry has it adds one to the count. Any
other takes one off, or the place where the count is 1. So new texts displace what came once, and
what comes often stays. A context never reaches beyond its text, so texts do not run into each
other. Two contexts with one hash cost a wrong draft, never a wrong output: drafts are verified.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Integer

from pallas_kernels.settings import own_settings
from specjax.checks import Whole, check_integer, shown
from specjax.drafting.acceptance_rates import Guess
from specjax.drafting.ngram_tables import last_tokens
from specjax.files.arrays import read_array
from specjax.files.atomic_directory import check_replaceable, replacing
from specjax.files.json_objects import read_object

CONTEXTS = (1, 2, 4, 8, 16)  # last tokens that are looked up
COUNTS = (1, 2, 4)  # entries are told apart by the fewest times that their token came
CAPACITY = 1 << 16  # contexts of each length; together 4 MB
_MOST_COUNT = 255
_MOST_CAPACITY = 1 << 26
_LONGEST = CONTEXTS[-1]
_CHUNK = 16  # tokens of every row that are written at a time
_PIECE = 256  # tokens of a text that are added at a time
_FACTORS = np.array([pow(0x9E3779B1, n, 2**32) for n in range(1, _LONGEST + 1)], np.uint32)
_MANIFEST, _ENTRIES = "suffix_memory.json", "entries.npy"
_VERSION = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SuffixMemory:
    """The tokens that followed the last ones of all texts so far: a pytree of one size.

    `Auto(memory=memory)` drafts from it. Decoding adds its own texts to a copy, so a memory that is
    to keep them gets them afterwards: `memory = memory.add([result.tokens, …])`.

    entries: uint32[L, C, 3]: hash, token and count of C contexts of each length; count 0: empty.
    vocab_size: entries of the vocabulary. Static.
    """

    entries: jax.Array = dataclasses.field(repr=False)
    vocab_size: int = jax.tree.static()

    @classmethod
    def create(cls, vocab_size: int, *, capacity: int = CAPACITY) -> SuffixMemory:
        """Makes an empty memory.

        Args:
          vocab_size: entries of the model's vocabulary, `params.config.vocab_size`.
          capacity: contexts of each length that it has room for, 60 bytes each. A text has about as
            many as it has tokens; in a full memory new ones displace those that came once.

        Raises:
          ValueError: a number is out of its range.
        """
        Whole(1, 2**31 - 1)("vocab_size", check_integer("vocab_size", vocab_size))
        Whole(1, _MOST_CAPACITY)("capacity", check_integer("capacity", capacity))
        return cls(jnp.zeros((len(CONTEXTS), int(capacity), 3), jnp.uint32), int(vocab_size))

    def add(
        self, texts: Iterable[Sequence[int] | Integer[Array | np.ndarray, " _"]]
    ) -> SuffixMemory:
        """Returns the memory with more texts in it; this one stays as it is.

        Args:
          texts: token ids of each, such as the `tokens` of completions.

        Raises:
          ValueError: a text is not a list of token ids of the vocabulary.
        """
        if not isinstance(texts, Iterable):
            raise ValueError(f"texts must be lists of token ids, got {shown(texts)}")
        memory = dataclasses.replace(self, entries=jnp.copy(self.entries))
        for text in texts:
            tokens = self._checked(text)
            for begin in range(0, len(tokens), _PIECE):
                first = max(begin - _LONGEST, 0)
                piece = tokens[first : begin + _PIECE]
                padded = np.pad(piece, (0, _LONGEST + _PIECE - len(piece)))[None]
                ends = np.array([[begin - first], [len(piece)]], np.int32)
                memory = _learn(memory, padded, *ends)
        return memory

    def save(self, target: str | Path) -> None:
        """Writes the memory as a directory: the whole of it, or nothing.

        Raises ValueError if `target` exists and is not a suffix memory.
        """
        with replacing(Path(target), check_target) as folder:
            np.save(folder / _ENTRIES, np.asarray(self.entries))
            manifest = {"version": _VERSION, "vocab_size": self.vocab_size, "contexts": CONTEXTS}
            (folder / _MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, source: str | Path) -> SuffixMemory:
        """Reads what `save` wrote. Raises ValueError if the directory holds something else."""
        folder = Path(source)
        if not (folder / _MANIFEST).is_file():
            raise ValueError(f"{source} is not a suffix memory: it has no {_MANIFEST}")
        manifest = read_object(folder / _MANIFEST)
        if (manifest.get("version"), manifest.get("contexts")) != (_VERSION, list(CONTEXTS)):
            raise ValueError(
                f"{source} is a suffix memory of version {shown(manifest.get('version'))}; this "
                f"specjax reads version {_VERSION}: make a new one"
            )
        vocab_size: Any = manifest.get("vocab_size")
        Whole(1, 2**31 - 1)(f"{folder / _MANIFEST}: vocab_size", vocab_size)
        file = folder / _ENTRIES
        entries = read_array(file, np.uint32, axes=3)
        if entries.shape[::2] != (len(CONTEXTS), 3) or entries.shape[1] > _MOST_CAPACITY:
            raise ValueError(
                f"{file} must hold uint32[{len(CONTEXTS)}, 1 … {_MOST_CAPACITY}, 3], "
                f"got uint32{list(entries.shape)}"
            )
        if (entries[..., 1] >= vocab_size).any() or (entries[..., 2] > _MOST_COUNT).any():
            raise ValueError(
                f"{file} must hold tokens below {vocab_size} and counts up to {_MOST_COUNT}, "
                "and holds others"
            )
        return cls(jnp.asarray(entries), vocab_size)

    def learn(
        self, tokens: Int32[Array, "B W"], begins: Int32[Array, " B"], ends: Int32[Array, " B"]
    ) -> SuffixMemory:
        """Returns the memory with the tokens at places begins … ends - 1 of every row.

        tokens: int32[B, W], texts; begins, ends: int32[B].
        """

        def write(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            start, entries = carry
            places = start[:, None] + jnp.arange(_CHUNK)
            rows = jnp.arange(tokens.shape[0])[:, None]
            come = tokens[rows, jnp.minimum(places, tokens.shape[1] - 1)]
            slots, hashes = self._address(last_tokens(tokens, places, _LONGEST))
            after = _counted(entries[_levels(), slots], hashes, come[..., None])
            meant = (places < ends[:, None]) & (places > 0)  # the first token follows nothing
            slots = jnp.where(meant[..., None], slots, entries.shape[1])
            return start + _CHUNK, entries.at[_levels(), slots].set(after, mode="drop")

        carry = begins, self.entries
        _, entries = lax.while_loop(lambda carry: jnp.any(carry[0] < ends), write, carry)
        return dataclasses.replace(self, entries=entries)

    def follow(self, tokens: Int32[Array, "B W"], lengths: Int32[Array, " B"], most: int) -> Guess:
        """Proposes what comes after each text, as far as its contexts are known.

        tokens: int32[B, W], texts, of which the first lengths: int32[B] tokens count; most: N.
        """
        rows = tokens.shape[0]
        nothing = jnp.zeros((rows, most), jnp.int32)

        def turn(carry: _Walk) -> _Walk:
            place, window, going, guess = carry
            token, kind, known = self._next(window)
            going &= known
            guess = Guess(
                guess.tokens.at[:, place].set(token),
                guess.kinds.at[:, place].set(kind),
                guess.counts + going,
            )
            return place + 1, jnp.concatenate([window[:, 1:], token[:, None]], 1), going, guess

        carry = (
            jnp.int32(0), last_tokens(tokens, lengths, _LONGEST), lengths > 0,
            Guess(nothing, nothing, jnp.zeros(rows, jnp.int32)),
        )  # fmt: skip
        carry = lax.while_loop(lambda carry: (carry[0] < most) & jnp.any(carry[2]), turn, carry)
        return carry[3]

    def _next(self, window: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The token that the longest known context proposes, its kind, and whether there is one.

        int32[B, 16] -> int32[B], int32[B], bool[B].
        """
        slots, hashes = self._address(window)
        held = self.entries[_levels(), slots]
        known = (held[..., 0] == hashes) & (held[..., 2] > 0)
        level = jnp.max(jnp.where(known, _levels(), 0), axis=-1)
        entry = jnp.take_along_axis(held, level[:, None, None], axis=1)[:, 0].astype(jnp.int32)
        counts = jnp.array(COUNTS)
        often = jnp.searchsorted(counts, entry[:, 2], side="right", method="compare_all") - 1
        kind = level * len(COUNTS) + jnp.maximum(often, 0)
        return entry[:, 1], kind.astype(jnp.int32), jnp.any(known, axis=-1)

    def _address(self, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The slots and the hashes of the contexts that end a window; -1 where there is no token.

        int32[..., 16] -> int32[..., L], uint32[..., L].
        """
        terms = (windows[..., ::-1] + 1).astype(jnp.uint32) * _FACTORS
        hashes = jnp.stack([jnp.sum(terms[..., :n], -1, jnp.uint32) for n in CONTEXTS], -1)
        mixed = (hashes ^ (hashes >> 16)) * jnp.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
        mixed ^= mixed >> 16
        return (mixed % self.entries.shape[1]).astype(jnp.int32), hashes

    def _checked(self, text: Any) -> np.ndarray:
        """A text as int32[n]. Raises ValueError unless it holds tokens of the vocabulary."""
        try:
            tokens = np.asarray(text)
            if tokens.ndim != 1 or not (tokens.size == 0 or tokens.dtype.kind in "iu"):
                raise ValueError
        except ValueError:
            raise ValueError(f"texts must be lists of token ids, got {shown(text)}") from None
        outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"texts must hold tokens from 0 to {self.vocab_size - 1}, got {outside[0]}"
            )
        return tokens.astype(np.int32)


def check_target(path: Path) -> None:
    """Raises ValueError if a path holds anything that a suffix memory must not replace."""
    check_replaceable(path, "a suffix memory", lambda found: (found / _MANIFEST).is_file())


_Walk = tuple[jax.Array, jax.Array, jax.Array, Guess]


@partial(jax.jit, donate_argnames="memory")
@own_settings()
def _learn(
    memory: SuffixMemory, tokens: jax.Array, begins: jax.Array, ends: jax.Array
) -> SuffixMemory:
    return memory.learn(tokens, begins, ends)


def _levels() -> jax.Array:
    return jnp.arange(len(CONTEXTS))


def _counted(held: jax.Array, hashes: jax.Array, token: jax.Array) -> jax.Array:
    """Entries after a token came in their contexts. uint32[..., L, 3], [..., L], [..., 1]."""
    token = jnp.broadcast_to(token, hashes.shape).astype(jnp.uint32)
    count = held[..., 2]
    same = (held[..., 0] == hashes) & (held[..., 1] == token) & (count > 0)
    taken = same | (count <= 1)
    count = jnp.where(same, jnp.minimum(count + 1, _MOST_COUNT), jnp.maximum(count, 2) - 1)
    new = jnp.stack([hashes, token], axis=-1)
    return jnp.concatenate(
        [jnp.where(taken[..., None], new, held[..., :2]), count[..., None]], axis=-1
    )
