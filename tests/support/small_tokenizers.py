"""Small tokenizers of each kind, different from the shipped one, and their spellings."""

from __future__ import annotations

import functools
import json

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import specjax
from checkpoints_tools.tokenizer import Tokenizer
from specjax.drafting.retokenize import Retokenizer, Speller


def letters(vocab: str, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """A byte-level tokenizer of a few tokens."""
    ids = {token: index for index, token in enumerate(vocab.split())}
    backend = tokenizers.Tokenizer(models.BPE(ids, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


SENTENCES = (
    "Once upon a time there was a little girl who loved the old garden behind the house.",
    "She was happy, and her mother said that the sun would come out again tomorrow.\n",
    "“Where is the dog?” asked the boy; the dog was under the bed.\n\n  It was 12 o'clock.",
)


def _byte_level(vocab_size: int) -> Tokenizer:
    """Byte-level BPE with other merges than the shipped tokenizer's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<|begin|>"],
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(SENTENCES, trainer)
    return Tokenizer(backend)


def _sentencepiece(vocab_size: int) -> Tokenizer:
    """Like Llama 2's: ▁ for spaces, one before the text, bytes as <0x00>, and a first token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>"], show_progress=False
    )
    backend.train_from_iterator([text.replace("\n", " ") for text in SENTENCES], trainer)
    model = json.loads(backend.to_str())["model"]
    vocab = model["vocab"] | {f"<0x{i:02X}>": len(model["vocab"]) + i for i in range(256)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend.model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return Tokenizer(backend)


def _permuted(tokenizer: Tokenizer, order: np.ndarray) -> Tokenizer:
    """The same tokens with other ids: i becomes order[i]."""
    written = json.loads(tokenizer._backend.to_str())
    vocab = written["model"]["vocab"]
    written["model"]["vocab"] = {token: int(order[index]) for token, index in vocab.items()}
    for added in written["added_tokens"]:
        added["id"] = int(order[added["id"]])
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(written)))


TINY = specjax.load_tokenizer("tiny")
OTHER = _byte_level(420)
LLAMA = _sentencepiece(300)
ORDER = np.random.default_rng(7).permutation(TINY.vocab_size)
PERMUTED = _permuted(TINY, ORDER)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


@functools.cache
def retokenizer(source: Tokenizer, result: Tokenizer) -> Retokenizer:
    return Retokenizer(speller(source), speller(result))


@functools.cache
def speller(tokenizer: Tokenizer) -> Speller:
    return Speller(tokenizer)


def spelled(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(speller(tokenizer).tokens[index] for index in ids)
