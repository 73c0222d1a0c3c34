"""Programs that take turns, so that a busy machine slows all of them: only ratios are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

_RESAMPLES = 2000
Input = TypeVar("Input")
Output = TypeVar("Output")


class Mean(NamedTuple):
    """A mean with its 95 % interval, which is None where there is one value alone."""

    mean: float
    low: float | None
    high: float | None


def take_turns(
    programs: Mapping[str, Callable[[Input], Output]],
    inputs: Sequence[Input],
    turns: int = 1,
    ran: Callable[[], None] = lambda: None,
) -> tuple[dict[str, np.ndarray], dict[str, list[Output]]]:
    """Runs all programs on every input, each time beginning with another program.

    Args:
      programs: by name, compiled before.
      inputs: what each of them is given.
      turns: how often all inputs are gone through.
      ran: called after every run.

    Returns:
      By name, the seconds of every run, f64[turns, inputs], and the outputs of the first turn.
    """
    names = list(programs)
    seconds = {name: np.zeros((turns, len(inputs))) for name in names}
    outputs: dict[str, list[Output]] = {name: [] for name in names}
    for number, (turn, place) in enumerate(np.ndindex(turns, len(inputs))):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            output = jax.block_until_ready(programs[name](inputs[place]))
            seconds[name][turn, place] = time.perf_counter() - begin
            if turn == 0:
                outputs[name].append(output)
            ran()
    return seconds, outputs


def geometric_mean(ratios: Sequence[float] | np.ndarray) -> Mean:
    """The geometric mean of ratios, with its interval by bootstrap over them."""
    logs = np.log(np.asarray(ratios, np.float64))
    mean = float(np.exp(logs.mean()))
    if len(logs) == 1:
        return Mean(mean, None, None)
    drawn = np.random.default_rng(0).integers(0, len(logs), (_RESAMPLES, len(logs)))
    low, high = np.exp(np.quantile(logs[drawn].mean(axis=1), (0.025, 0.975)))
    return Mean(mean, float(low), float(high))
