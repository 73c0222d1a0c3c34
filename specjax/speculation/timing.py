"""Times passes in compiled loops over a state.

The programs take turns, so that a busy machine slows all of them, and only ratios of their medians
are used.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.activations import Activation
from pallas_kernels.settings import own_settings
from specjax.model.params import Params
from specjax.speculation.state import DecodeState, Proposal
from specjax.speculation.verification import verify

_CALL_SECONDS = 0.1  # of work per timed call, so that the call itself does not count
_MOST_REPEATS = 512

Timed = tuple[DecodeState, jax.Array]  # the state after timed passes, and a sum of their results


@partial(jax.jit, static_argnames=("drafts", "activation", "layers"), donate_argnames="state")
@own_settings()
def verify_repeatedly(
    params: Params,
    state: DecodeState,
    repeats: int,
    drafts: int,
    activation: Activation,
    layers: tuple[int, ...] | None,
) -> Timed:
    """Verifies a draft of zeros repeatedly. The sum keeps the compiler from dropping passes."""
    proposal = Proposal(jnp.zeros((state.tokens.shape[0], drafts), jnp.int32))

    def one_pass(_: jax.Array, carry: Timed) -> Timed:
        state, total = carry
        verified, cache = verify(params, state, proposal, activation, layers)
        return dataclasses.replace(state, cache=cache), total + jnp.sum(verified.emitted)

    carry: Timed = lax.fori_loop(0, repeats, one_pass, (state, jnp.int32(0)))
    return carry


def seconds(
    program: Callable[[DecodeState, int], Timed],
    holder: list[DecodeState],
    repeats: int,
) -> float:
    """Seconds per repetition of a program, which replaces the holder's state."""
    begin = time.perf_counter()
    holder[0], total = program(holder[0], repeats)
    jax.block_until_ready(total)
    return (time.perf_counter() - begin) / repeats


def relative(
    groups: Sequence[Sequence[Callable[[int], float]]], turns: int
) -> tuple[list[list[float]], float]:
    """Every timer's median over the first one's of the same turn, and that one's seconds."""
    timers = [timer for group in groups for timer in group]
    for timer in timers:
        timer(1)  # compiles
    repeats = [max(1, min(_MOST_REPEATS, int(_CALL_SECONDS / timer(1)))) for timer in timers]
    times = np.array(
        [[timer(count) for timer, count in zip(timers, repeats, strict=True)] for _ in range(turns)]
    )
    found = iter(np.median(times / times[:, :1], axis=0).tolist())
    return [[next(found) for _ in group] for group in groups], float(np.median(times[:, 0]))
