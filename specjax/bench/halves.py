"""Rounds run one half at a time, so that the host sees what each half takes and keeps.

`decode` runs whole rounds in one program. Here the host starts the draft and the verification of
every round, which makes both a little slower, and adds up what it sees.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np

from specjax.bench.chunks import Chunk
from specjax.generation.decoding import start
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.rounds import conclude, propose


@dataclasses.dataclass(frozen=True)
class Halves:
    """The sums over rounds.

    draft_seconds, verify_seconds: of all rounds.
    tested, kept: int64[N], drafts at each place of a round that the target decided on, and those
        of them that it kept. In a tree a place is a depth.
    state_bytes: the KV caches and what the drafter keeps per row, the largest that there was.
    """

    draft_seconds: float
    verify_seconds: float
    tested: np.ndarray
    kept: np.ndarray
    state_bytes: int

    @classmethod
    def none(cls, places: int) -> Halves:
        nothing = np.zeros(places, np.int64)
        return cls(0.0, 0.0, nothing, nothing, 0)

    def __add__(self, other: Halves) -> Halves:
        return Halves(
            self.draft_seconds + other.draft_seconds,
            self.verify_seconds + other.verify_seconds,
            self.tested + other.tested,
            self.kept + other.kept,
            max(self.state_bytes, other.state_bytes),
        )


def run_halves(
    params: Params,
    drafter: Drafter,
    chunk: Chunk,
    *,
    max_new_tokens: int,
    cache_bits: int = 16,
    most: int | None = None,
) -> Halves:
    """Decodes prompts greedily, and measures every round.

    Args:
      params: the model.
      drafter: proposes tokens.
      chunk: the prompts.
      max_new_tokens: the most tokens to generate per row.
      cache_bits: bits per cache entry.
      most: rounds to run; None: all. One round compiles what the others need.

    Returns:
      The sums.
    """
    state = start(
        params, chunk.tokens, prompt_lengths=chunk.lengths, drafter=drafter,
        max_new_tokens=max_new_tokens, cache_bits=cache_bits,
    )  # fmt: skip
    total = dataclasses.replace(
        Halves.none(drafter.draft_length),
        state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
    )
    running, rounds = ~np.asarray(state.finished), 0
    while running.any() and rounds != most:
        begin = time.perf_counter()
        proposal, state = jax.block_until_ready(propose(params, state, drafter))
        drafted = time.perf_counter()
        state, verified = jax.block_until_ready(conclude(params, state, drafter, proposal))
        ended = time.perf_counter()
        tested, kept = (np.asarray(each)[running] for each in (verified.tested, verified.accepted))
        total += Halves(
            drafted - begin, ended - drafted,
            _at_places(tested, drafter.draft_length), _at_places(kept, drafter.draft_length), 0,
        )  # fmt: skip
        running, rounds = ~np.asarray(state.finished), rounds + 1
    return total


def _at_places(counts: np.ndarray, places: int) -> np.ndarray:
    """How many of the rows' leading counts reach each place. int[B] -> int64[places]."""
    reached: np.ndarray = np.count_nonzero(counts[:, None] > np.arange(places), axis=0)
    return reached
