"""Translates between two vocabularies, for a draft model with another tokenizer.

These functions run on the host, called from the compiled loop. They keep a cache of words but no
state: every result depends only on the arguments.

A text is cut where tokenizers cut it as well, before the space between two words, and its words are
encoded one by one. Most words are in the cache, so a growing text costs little. A word that its own
tokenizer would have encoded differently is translated token by token: models do write such words,
and a draft model with the same tokens then reads and proposes the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np

_PASSAGE = 64  # tokens, at least, that are remembered together
_WORDS = 2**16  # remembered per direction
_PASSAGES = 2**12


@runtime_checkable
class TextTokenizer(Protocol):
    """A tokenizer whose tokens can be read as bytes; `specjax.load_tokenizer` returns one."""

    def __hash__(self) -> int: ...

    def encode(self, text: str, special_tokens: bool = True) -> list[int]: ...

    def vocabulary(self) -> list[bytes | str | None]:
        """Returns, by id, a token's bytes, a special token's name, or None."""


class Speller:
    """A tokenizer's tokens as bytes, and bytes as its tokens.

    tokens: by id, bytes, the name of a special token, or None; the last for all larger ids.
    ids: the first id of each of them.
    opening: the special tokens that the tokenizer adds before a text.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [*tokenizer.vocabulary(), None]
        last = len(self.tokens) - 1
        self.ids = {token: last - i for i, token in enumerate(reversed(self.tokens)) if token}
        self.opening = tokenizer.encode("")
        # Some add a space to the beginning of a text; they show a word as it is after a line.
        self._before = "" if self._bytes(self._encode("a")) == b"a" else "\n"
        self._skipped = len(self._encode(self._before))

    def canonical(self, text: bytes) -> tuple[int, ...] | None:
        """Encodes `text`; None if the tokens do not spell it."""
        try:
            ids = self._encode(self._before + text.decode())[self._skipped :]
        except UnicodeDecodeError:
            return None
        return tuple(ids) if self._bytes(ids) == text else None

    def spell(self, token: bytes | str | None) -> tuple[int, ...]:
        """Translates another tokenizer's token: the same token, or tokens of as much of its text
        as possible."""
        if token in self.ids:
            return (self.ids[token],)
        if not isinstance(token, bytes):
            return ()
        whole = self.canonical(token)
        if whole is not None:
            return whole
        letters = (bytes([byte]) for byte in token)
        return tuple(self.ids[letter] for letter in letters if letter in self.ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special_tokens=False)

    def _bytes(self, ids: list[int]) -> bytes | None:
        return _text([self.tokens[index] for index in ids])


class Retokenizer:
    """Turns ids of one tokenizer into another's ids of the same text."""

    def __init__(self, source: Speller, result: Speller) -> None:
        self._source, self._result = source, result
        tokens = source.tokens
        texts = [token if isinstance(token, bytes) and token else b"\0" for token in tokens]
        self._special = np.array([not isinstance(token, bytes) for token in tokens])
        self._ends = np.array([not text[-1:].isspace() for text in texts])
        self._begins = np.array([text[:1] == b" " and not text[1:2].isspace() for text in texts])
        self._word = lru_cache(_WORDS)(self._translate_word)
        self._passage = lru_cache(_PASSAGES)(self._translate_passage)

    def __call__(self, ids: np.ndarray) -> list[int]:
        """Translates int32[n] to ids of the other tokenizer."""
        passages = (self._passage(passage.tobytes()) for passage in self._passages(ids))
        return [*chain.from_iterable(passages)]

    def last_word(self, ids: np.ndarray) -> np.ndarray:
        """Returns the end of int32[n] whose encoding the next tokens may still change."""
        *_, passage = self._passages(ids)
        return passage[[0, *self._cuts(passage)][-1] :]

    def _passages(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Cuts a text into passages of some words. Text added at the end changes only the last
        one."""
        cuts = self._cuts(ids)
        start = 0
        while len(ids) - start > _PASSAGE:
            place = np.searchsorted(cuts, start + _PASSAGE)
            end = min([*cuts[place : place + 1], start + 2 * _PASSAGE])  # a text without spaces
            if end > len(ids):
                break
            yield ids[start:end]
            start = end
        yield ids[start:]

    def _cuts(self, ids: np.ndarray) -> np.ndarray:
        """Returns the places where words begin, except the first, in rising order."""
        ids = np.minimum(ids, len(self._special) - 1)
        before, after = ids[:-1], ids[1:]
        cut = self._special[before] | self._special[after]
        cut |= self._ends[before] & self._begins[after]
        return np.flatnonzero(cut) + 1

    def _translate_passage(self, ids: bytes) -> tuple[int, ...]:
        passage = np.frombuffer(ids, np.int32)
        words = np.split(passage, self._cuts(passage))
        return tuple(chain.from_iterable(self._word(tuple(word.tolist())) for word in words))

    def _translate_word(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        tokens = [self._source.tokens[min(index, len(self._source.tokens) - 1)] for index in ids]
        text = _text(tokens)
        if text is not None and self._source.canonical(text) == ids:
            whole = self._result.canonical(text)
            if whole is not None:
                return whole
        return tuple(chain.from_iterable(self._result.spell(token) for token in tokens))


class Translation:
    """Translates between the tokens of a target and those of a draft model.

    target_ids: int32[V'], for each draft token the target token with the same bytes or name, or -1.
        Two draft tokens never share one.
    draft_size, target_size: one more than the largest token id of each.
    """

    def __init__(self, draft: TextTokenizer, target: TextTokenizer) -> None:
        ours, theirs = Speller(draft), Speller(target)
        self._opening = ours.opening
        self._to_draft = Retokenizer(theirs, ours)
        self._to_target = Retokenizer(ours, theirs)
        self.target_ids = np.full(len(ours.tokens) - 1, -1, np.int32)
        for token, index in ours.ids.items():
            self.target_ids[index] = theirs.ids.get(token, -1)
        self.draft_size, self.target_size = len(ours.tokens) - 1, len(theirs.tokens) - 1

    def read(
        self, tokens: np.ndarray, lengths: np.ndarray, *, room: int, slots: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Translates the texts that the draft model reads.

        Args:
          tokens: int32[B, W], the target's; the first lengths: int32[B] are a row's text, 0 for a
            row to skip.
          room: the most tokens that the draft model may read. A longer text loses its beginning,
            half of the room at a time, so that most cache entries stay valid.
          slots: S, the width of the result.

        Returns:
          int32[B, S], and int32[B], the tokens of each row: at least one.
        """
        read = np.zeros((len(tokens), slots), np.int32)
        counts = np.ones(len(tokens), np.int32)
        for row, text in _rows(tokens, lengths):
            ids, opening = self._to_draft(text), self._opening
            if ids[: len(opening)] == opening:
                ids = ids[len(opening) :]
            excess, half = max(len(opening) + len(ids) - room, 0), room // 2
            ids = (opening + ids[-(-excess // half) * half :]) or [0]
            counts[row] = len(ids)
            read[row, : len(ids)] = ids
        return read, counts

    def propose(
        self, tokens: np.ndarray, lengths: np.ndarray, drafted: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Translates drafts into the target's tokens, as continuations of its texts.

        Args:
          tokens, lengths: as in `read`.
          drafted: int32[B, N], the draft's own tokens; the first counts: int32[B] of them count.

        Returns:
          int32[B, N], and int32[B], the number that counts. Tokens past N are left out.
        """
        proposed = np.zeros_like(drafted)
        meant = np.zeros_like(counts)
        for row, text in _rows(tokens, lengths):
            ids = self._continue(text, drafted[row, : counts[row]])[: drafted.shape[1]]
            meant[row] = len(ids)
            proposed[row, : len(ids)] = ids
        return proposed, meant

    def _continue(self, text: np.ndarray, drafted: np.ndarray) -> list[int]:
        """Encodes the draft as the target would write it after the word that its text ends in.

        If the target has begun that word differently, encodes the draft alone.
        """
        word = self._to_draft.last_word(text)
        whole = self._to_target(np.array([*self._to_draft(word), *drafted], np.int32))
        if whole[: len(word)] == word.tolist():
            return whole[len(word) :]
        return self._to_target(drafted)


def _rows(tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the requested rows with their texts."""
    for row, length in enumerate(lengths):
        if length > 0:
            yield row, tokens[row, :length]


def _text(tokens: list[bytes | str | None]) -> bytes | None:
    """Joins the bytes of tokens; None if one of them is not text."""
    texts = [token for token in tokens if isinstance(token, bytes)]
    return b"".join(texts) if len(texts) == len(tokens) else None


@lru_cache(16)
def translation(draft: TextTokenizer, target: TextTokenizer) -> Translation:
    """Returns the translation between two tokenizers; there is one per pair."""
    return Translation(draft, target)
