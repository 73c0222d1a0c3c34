"""Log-probabilities as OpenAI writes them: tokens by their texts and bytes."""

from __future__ import annotations

import itertools
from typing import Any

from specjax.generation.text import TokenCodec
from specjax.speculation.logprobs import Logprobs

_LEAST = -9999.0  # JSON has no infinity


class TokenTexts:
    """The text of each token by itself."""

    def __init__(self, tokenizer: TokenCodec) -> None:
        self._tokenizer = tokenizer
        self._bytes: list[bytes | str | None] = []
        if hasattr(tokenizer, "vocabulary"):
            try:
                self._bytes = tokenizer.vocabulary()
            except ValueError:  # its tokens are written in an unknown way
                self._bytes = []

    def bytes(self, token: int) -> bytes:
        """The bytes of a token; of a special one, those of its name."""
        written = self._bytes[token] if token < len(self._bytes) else None
        if written is None:
            written = self._tokenizer.decode([token])
        return written.encode() if isinstance(written, str) else written

    def text(self, token: int) -> str:
        """The text of a token; half a character becomes the replacement character."""
        return self.bytes(token).decode(errors="replace")

    def chat(self, tokens: list[int], logprobs: Logprobs, most: int) -> list[dict[str, Any]]:
        """Entries of a chat's `logprobs.content`."""
        return [
            self._entry(token, float(logprobs.tokens[place]))
            | {"top_logprobs": [self._entry(*each) for each in _top(logprobs, place, most)]}
            for place, token in enumerate(tokens)
        ]

    def completion(
        self, tokens: list[int], logprobs: Logprobs, most: int, offset: int
    ) -> dict[str, Any]:
        """A completion's `logprobs`. offset: characters before the first token."""
        texts = [self.text(token) for token in tokens]
        *offsets, _ = itertools.accumulate(map(len, texts), initial=offset)
        top = [
            {self.text(token): _number(value) for token, value in _top(logprobs, place, most)}
            for place in range(len(tokens))
        ]
        return {
            "tokens": texts,
            "token_logprobs": [_number(value) for value in logprobs.tokens[: len(tokens)]],
            "top_logprobs": top if most else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {
            "token": self.text(token), "logprob": _number(value), "bytes": list(self.bytes(token))
        }  # fmt: skip


def _top(logprobs: Logprobs, place: int, most: int) -> list[tuple[int, float]]:
    tokens, values = logprobs.top_tokens[place], logprobs.top_logprobs[place]
    return list(zip(tokens[:most].tolist(), values[:most].tolist(), strict=True))


def _number(value: float) -> float:
    return max(float(value), _LEAST)
