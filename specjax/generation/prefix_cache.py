"""The part that prompts have in common: KV entries of whole chunks, read once.

A chunk's entries depend on the tokens up to its end and on nothing else, and a prompt is read in
chunks at fixed places. So a kept chunk has the bits that reading it again would give, and output is
the same with and without it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile

import jax
import numpy as np

from specjax.generation.batch_rows import Block, PromptReading, cut_block, put_block
from specjax.model.kv_cache import KVCache
from specjax.model.transformer import CHUNK

MOST_BYTES = 2**28


class PrefixCache:
    """Chunks of prompts by all tokens up to their ends; the least recently used goes first.

    most_bytes: the most that the chunks may take.
    outputs: keep the chunks of outputs too, for the next turns of conversations. On CPUs their
        entries have the bits that reading them would give; elsewhere they may not.

    asked: tokens of prompts that were looked up.
    found: those of them that were here.
    nbytes: what the chunks take.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, *, outputs: bool = False) -> None:
        self._most_bytes, self.outputs = most_bytes, outputs
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self.asked = self.found = self.nbytes = 0

    def resume(self, reading: PromptReading) -> PromptReading:
        """Returns a prompt of which nothing is read yet with its known chunks in its cache."""
        tokens, cache, done = reading.prompt.tokens, reading.cache, 0
        known = list(takewhile(self._blocks.__contains__, _names(tokens[:-1])))
        for name in known:
            cache = put_block(cache, self._blocks[name], np.int32(done))
            done += CHUNK
        self.asked += len(tokens)
        self.found += done
        self._touch(known)
        return reading._replace(cache=cache, done=done)

    def keep(self, reading: PromptReading, before: int) -> None:
        """Keeps the chunk that has just been read, if it is whole. before: tokens read before."""
        if reading.done == before + CHUNK:
            self._add(_names(reading.prompt.tokens[: reading.done]), reading.cache, 0)

    def keep_row(self, cache: KVCache, row: int, tokens: np.ndarray) -> None:
        """Keeps all whole chunks of a row, whose cache has entries of these tokens."""
        names = _names(tokens)
        for count in range(1, len(names) + 1):
            self._add(names[:count], cache, row)

    def _add(self, names: list[bytes], cache: KVCache, row: int) -> None:
        """Keeps the last of some chunks of a text, all from the first on, unless it is here."""
        name = names[-1]
        if name not in self._blocks:
            start = (len(names) - 1) * CHUNK
            self._blocks[name] = cut_block(cache, np.int32(row), np.int32(start))
            self.nbytes += _size(name, self._blocks[name])
            self._touch(names)
            while self.nbytes > self._most_bytes:
                self.nbytes -= _size(*self._blocks.popitem(last=False))

    def _touch(self, names: list[bytes]) -> None:
        """Marks chunks as used: the first of a text last, since the others are of no use without
        it."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)


def _names(tokens: np.ndarray) -> list[bytes]:
    """The names of a text's whole chunks: each tells all tokens up to the chunk's end."""
    name, names = b"", []
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        name = hashlib.blake2b(name + tokens[end - CHUNK : end].tobytes(), digest_size=32).digest()
        names.append(name)
    return names


def begin_alike(prompts: Iterable[np.ndarray]) -> bool:
    """Tells whether two prompts have their first chunk in common."""
    first = [prompt[:CHUNK].tobytes() for prompt in prompts if len(prompt) > CHUNK]
    return len(set(first)) < len(first)


def _size(name: bytes, block: Block) -> int:
    return len(name) + sum(int(leaf.nbytes) for leaf in jax.tree.leaves(block))
