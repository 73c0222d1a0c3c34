"""A checkpoint's tokenizer, reduced to what decoding text needs.

A `tokenizer.json` is read by the `tokenizers` library, which is quick to import. Older checkpoints
have only a SentencePiece `tokenizer.model`; transformers rebuilds the former from it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import tokenizers


class Tokenizer:
    """Text to token ids and back.

    `encode` adds the special tokens that the checkpoint's own tokenizer adds (Llama's first token,
    for example); `decode` leaves special tokens out.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        backend.no_truncation()  # a checkpoint may have been saved with the settings of training
        backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included; a model's own `vocab_size` may be larger."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        return self._backend.encode(text).ids

    def decode(self, ids: Sequence[int] | np.ndarray | jax.Array) -> str:
        """The text of `ids`, a list or an integer array of one dimension."""
        return self._backend.decode(np.asarray(ids, np.int64).tolist())


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
    try:
        if file.suffix == ".json":
            return Tokenizer(tokenizers.Tokenizer.from_file(str(file)))
        return Tokenizer(_from_sentencepiece(path))
    except Exception as error:  # both libraries raise bare Exception, among others
        raise ValueError(f"{file} cannot be read: {error}") from error


def _from_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    for package in ("sentencepiece", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"this needs {package}: pip install 'specjax[sentencepiece]'")
    import transformers  # here, because it takes seconds

    if (path / "tokenizer_config.json").is_file():
        loaded = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    else:  # of the supported families only Llama's and Mistral's have such files
        loaded = transformers.LlamaTokenizer.from_pretrained(path, add_bos_token=True)
    return loaded.backend_tokenizer
