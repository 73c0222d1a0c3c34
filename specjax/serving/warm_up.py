"""An engine runs everything once before it serves, so that no client waits for a compiler."""

from __future__ import annotations

import numpy as np

from specjax.generation.batch import Batch
from specjax.model.transformer import CHUNK
from specjax.serving.asks import Ask, Piece
from specjax.speculation.first_rows import move_row
from specjax.speculation.sampling import Sampling

MOST_ROUNDS = 16  # that the device runs before the host looks


def warm_up(batch: Batch, context: int, sampling: Sampling | None, scored: bool) -> None:
    """Runs a chunk that is read, one that an output fills, one that is found, a prompt that is
    scored, an output that is given up, and a row that moves.

    Args:
      batch: has no prompts, before and after.
      context: tokens of a prompt and its output.
      sampling, scored: as the outputs ask for them.
    """
    if len(batch.requests) > 1:
        batch.state = move_row(batch.state, np.int32(1), np.int32(0))
    lengths = [CHUNK, 2 * CHUNK + 2, 2 * CHUNK + 2, CHUNK, 2]
    scoring, given_up = len(lengths) - 2, len(lengths) - 1
    for number, length in enumerate(lengths):
        text = int(number == 0)  # the first has nothing in common with the others
        tokens = np.full(min(length, context - 2), text, np.int32)
        echoed = scored and number == scoring
        ask = Ask(
            tokens, 2, sampling, 2**32 - 1, (0, 1), scored, echoed, None, frozenset(), _ignore
        )
        batch.add(ask.waiting(number))
    while batch.busy:
        batch.fill()
        if any(prompt.number == given_up for prompt in batch.running.values()):
            batch.drop(given_up)
        elif batch.running:
            batch.steps(1, MOST_ROUNDS)
            for row in batch.finished():
                batch.take(row)


def _ignore(_: Piece) -> None:
    """Nobody hears of outputs that are made before the start."""
