"""Pieces that come while their reader is busy reach it as one."""

from __future__ import annotations

import asyncio
import threading

import numpy as np

from specjax.serving.asks import Piece
from specjax.serving.mailbox import Mailbox
from specjax.speculation.logprobs import Logprobs


def scored(token: int) -> Piece:
    one = np.full(1, token, np.float32)
    return Piece([token], Logprobs(one, one[:, None].astype(np.int32), one[:, None]))


def test_a_slow_reader_gets_one_piece_of_each_output() -> None:
    async def read() -> None:
        box, echoed = Mailbox(live=True), scored(7).logprobs
        pieces = [scored(1)._replace(echoed=echoed), scored(2), Piece([], None, "error", "broken")]

        def put() -> None:
            for piece in pieces:
                box.put(3, piece)
            box.put(0, Piece([5]))

        thread = threading.Thread(target=put)
        thread.start()
        thread.join()
        found = await box.take()
        assert found.keys() == {3, 0} and found[0] == Piece([5])
        tokens, logprobs, finish, error, first = found[3]
        assert (tokens, finish, error) == ([1, 2], "error", "broken") and first is echoed
        assert logprobs is not None
        np.testing.assert_array_equal(logprobs.tokens, [1, 2])
        np.testing.assert_array_equal(logprobs.top_tokens, [[1], [2]])
        box.put(0, Piece([6], finish="stop"))
        assert await box.take() == {0: Piece([6], finish="stop")}

    asyncio.run(read())


def test_a_patient_reader_is_woken_by_the_last_piece() -> None:
    async def read() -> None:
        box = Mailbox(live=False)
        box.put(1, Piece([1]))
        waiting = asyncio.ensure_future(box.take())
        await asyncio.sleep(0.05)
        assert not waiting.done() and box.first > 0
        box.put(1, Piece([2], finish="length"))
        assert await waiting == {1: Piece([1, 2], finish="length")}

    asyncio.run(read())


def test_a_reader_whose_loop_has_ended_stops_nobody() -> None:
    async def leave() -> Mailbox:
        return Mailbox(live=True)

    box = asyncio.run(leave())
    box.put(0, Piece([1]))
    box.put(0, Piece([2], finish="length"))
