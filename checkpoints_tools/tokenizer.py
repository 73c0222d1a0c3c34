"""A checkpoint's tokenizer, with only the methods that this library needs.

A `tokenizer.json` is read by the `tokenizers` library, which is quick to import. Older checkpoints
have only a SentencePiece `tokenizer.model`, which transformers converts.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

from checkpoints_tools.chat.template import ChatTemplate, read_chat_template
from specjax.checks import printable, shown

MOST_IDS = 2**24  # of a vocabulary; the largest that is published has fewer than 2**19


class Tokenizer:
    """Text to token ids and back.

    `encode` adds the special tokens that the checkpoint's own tokenizer adds (Llama's first token,
    for example). `decode` leaves special tokens out. Tokenizers with the same contents are equal,
    so a program compiled for one serves the other.

    Args:
      backend: the tokenizer of the `tokenizers` library that does the work.
      path: the directory or file that it comes from, for messages.
      chat: the checkpoint's chat template, None if it has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        self._backend, self._path, self._chat = backend, path, chat
        backend.no_truncation()  # a checkpoint may have been saved with the settings of training
        backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """The number of tokens, with added ones; a model's own `vocab_size` may be larger."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with or without the special tokens around it.

        Raises ValueError if `text` is something else, or text that cannot be written as UTF-8.
        """
        if not isinstance(text, str) or _SURROGATE.search(text):
            raise ValueError(f"text must be text in Unicode, got {shown(text)}")
        with one_sentence("the tokenizer cannot read the text"):
            return self._backend.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int] | np.ndarray | jax.Array) -> str:
        """The text of `ids`, a list or a one-dimensional integer array."""
        given = np.asarray(ids, np.int64).tolist()
        with one_sentence("the tokenizer cannot write the tokens"):
            return self._backend.decode(given)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A conversation in the format that the model was trained on.

        Args:
          messages: mappings with "role" ("system", "user" or "assistant") and "content".
          answer: end the text where the model's answer begins. If False, the text ends within the
            last message, and the model continues that message.
          tools: functions that the model may call, as OpenAI's clients write them; None: none.

        Returns:
          The text, with special tokens written by name. Encode it with `special_tokens=False`.

        Raises:
          ValueError: the checkpoint has no chat template; or the template refuses these messages,
            fails, takes no tools, or takes too much time, memory or text.
        """
        return self._template.render(messages, answer, tools)

    @property
    def chat_template(self) -> str:
        """The Jinja template that `chat` renders. Raises ValueError if the checkpoint has none."""
        return self._template.text

    def save(self, directory: Path) -> None:
        """Writes the files from which `read_tokenizer` reads the same tokenizer."""
        self._backend.save(str(directory / "tokenizer.json"))
        if self._chat is not None:
            self._chat.save(directory)

    @property
    def _template(self) -> ChatTemplate:
        if self._chat is None:
            raise ValueError(f"the tokenizer of {self._path} has no chat template")
        return self._chat

    @cached_property
    def _contents(self) -> str:
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:12]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self._contents == other._contents

    def __hash__(self) -> int:
        return hash(self._contents)

    def __repr__(self) -> str:
        return f"Tokenizer({self._contents})"

    def same_tokens(self, other: Tokenizer) -> bool:
        """Whether every id means the same token in both."""
        return self._backend.get_vocab() == other._backend.get_vocab()

    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by name."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: index for index, token in added if token.special}

    def vocabulary(self) -> list[bytes | str | None]:
        """The bytes of each token, by id.

        A special token has its name (str) instead, and an id without a token has None.

        Raises ValueError unless the tokens are written as in byte-level BPE or SentencePiece.
        """
        decoder = self._backend.decoder
        kind = "" if decoder is None else decoder.__getstate__().decode()
        if "ByteLevel" not in kind and SPACE not in kind:
            raise ValueError(
                f"the tokenizer writes its tokens in an unknown way: decoder {shown(kind)}"
            )
        read = _byte_level if "ByteLevel" in kind else _sentencepiece
        written = self._backend.get_vocab()
        size = max(written.values(), default=-1) + 1
        if size > MOST_IDS:
            raise ValueError(f"the tokenizer has the id {size - 1}; accepted: below {MOST_IDS}")
        entries: list[bytes | str | None] = [None] * size
        for token, index in written.items():
            entries[index] = read(token)
        for index, added in self._backend.get_added_tokens_decoder().items():
            entries[index] = added.content if added.special else added.content.encode()
        return entries


_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character of UTF-16, not of UTF-8
SPACE = "▁"  # how SentencePiece writes a space
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how it writes a byte of an unknown character
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
# GPT-2 writes these bytes as characters of Latin-1, and the others as characters from U+0100 on.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}


def _byte_level(token: str) -> bytes | None:
    """A token of byte-level BPE; None if one of its characters does not stand for a byte."""
    return bytes(_BYTES[char] for char in token) if _BYTES.keys() >= {*token} else None


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer in a directory.

    Args:
      path: a directory with tokenizer.json or tokenizer.model.

    Returns:
      The tokenizer.

    Raises:
      FileNotFoundError: the directory has neither file.
      ValueError: the file cannot be read.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        file = path / "tokenizer.model"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has neither tokenizer.json nor tokenizer.model")
    with one_sentence(f"{file} cannot be read"):
        if file.suffix == ".json":
            backend = tokenizers.Tokenizer.from_file(str(file))
        else:
            backend = _from_sentencepiece(path)
    return Tokenizer(backend, path, read_chat_template(path))


@contextlib.contextmanager
def one_sentence(failure: str) -> Iterator[None]:
    """Turns whatever the libraries raise into a ValueError: bare exceptions, and panics in Rust."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{failure}: {printable(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which has no public name
            raise
        raise ValueError(f"{failure}: {printable(error)}") from error


def _from_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    for package in ("sentencepiece", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"this needs {package}: pip install 'specjax[sentencepiece]'")
    import transformers  # here, because it takes seconds

    if (path / "tokenizer_config.json").is_file():
        loaded = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    else:  # among the supported families, only Llama and Mistral have such files
        loaded = transformers.LlamaTokenizer.from_pretrained(path, add_bos_token=True)
    return loaded.backend_tokenizer
