"""The result of one prompt of a batch."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from specjax.generation.decoding import failure
from specjax.generation.request import Request
from specjax.model.parallel import readable
from specjax.model.params import Params
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.state import DecodeState, Stats


@dataclasses.dataclass(frozen=True)
class Completion:
    """The result of one prompt.

    tokens: int32[n], the prompt included; int32[0] where the prompt was refused.
    stats: counts, int32[] each.
    levels: counts of the levels that drafted; see `DecodeResult`.
    error: why the prompt was refused, or why its output ended early: the model's next logits were
        NaN or infinite, or its grammar could not be followed. None: neither.
    logprobs: log-probabilities of the new tokens; None: not asked for, or the prompt was refused.
    """

    tokens: np.ndarray
    stats: Stats
    levels: tuple[Stats, ...] = ()
    error: str | None = None
    logprobs: Logprobs | None = None


def completed(
    params: Params, request: Request, state: DecodeState, row: int, end: int | None = None
) -> Completion:
    """Returns what a row holds, or its first `end` tokens."""
    levels = request.drafter.levels(state.draft)
    values = state.tokens, state.lengths, state.stats, state.failed, levels, state.logprobs
    tokens, length, stats, failed, levels, logprobs = jax.tree.map(
        lambda leaf: np.array(np.asarray(leaf)[row]), readable(values, params.mesh)
    )
    error = None
    if end is not None:
        stats = dataclasses.replace(stats, generated=stats.generated - (length - end))
        length = end
    elif failed:
        error = failure(int(stats.generated))
    logprobs = jax.tree.map(lambda leaf: leaf[: int(stats.generated)], logprobs)
    return Completion(tokens[:length], stats, levels, error, logprobs)


def refusal(error: str) -> Completion:
    """Returns the result of a prompt that cannot be decoded."""
    none = jax.tree.map(lambda counts: np.asarray(counts[0]), Stats.zeros(1))
    return Completion(np.zeros(0, np.int32), none, error=error)
