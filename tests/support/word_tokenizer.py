"""A tokenizer of words, in sentencepiece's notation."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models


class WordTokenizer:
    """Tokens are words with a leading space, which the first word of a text loses."""

    def __init__(self, vocab_size: int) -> None:
        vocab = {"<s>": 0, "</s>": 1} | {f"▁w{index}": index for index in range(2, vocab_size)}
        self._backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
        self._backend.add_special_tokens(["<s>", "</s>"])
        self._backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    def encode(self, text: str) -> list[int]:
        return [0, *(int(word[1:]) for word in text.split())]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids))
