"""Pieces on their way from the engine's thread to a reader in the event loop.

The reader is woken once for all that came since it looked, and gets it as one piece per output. So
a loop that has much to do does less for each token.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import jax
import numpy as np

from specjax.serving.asks import Piece


class Mailbox:
    """A mailbox of the running event loop.

    live: wake the reader for every piece; False: for the last one of each output.

    first: when the first piece of an output came, as `time.perf_counter` tells it.
    """

    def __init__(self, live: bool) -> None:
        self._live, self._loop = live, asyncio.get_running_loop()
        self._lock, self._woken = threading.Lock(), asyncio.Event()
        self._pieces, self._calling = defaultdict[int, list[Piece]](list), False
        self.first = 0.0

    def put(self, index: int, piece: Piece) -> None:
        """Adds a piece of an output. Any thread may call it, and none waits."""
        with self._lock:
            self.first = self.first or time.perf_counter()
            self._pieces[index].append(piece)
            if self._calling or not (self._live or piece.finish):
                return
            self._calling = True
        with contextlib.suppress(RuntimeError):  # the reader's loop has been closed
            self._loop.call_soon_threadsafe(self._woken.set)

    async def take(self) -> dict[int, Piece]:
        """Waits, and takes all that is there, by the numbers of the outputs."""
        await self._woken.wait()
        self._woken.clear()
        with self._lock:
            taken, self._pieces = self._pieces, defaultdict(list)
            self._calling = False
        return {index: _joined(pieces) for index, pieces in taken.items()}


def _joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of an output as one."""
    first, last = pieces[0], pieces[-1]
    if first is last:
        return first
    scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = jax.tree.map(lambda *parts: np.concatenate(parts), *scored) if scored else None
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(tokens, logprobs, last.finish, last.error, first.echoed)
