"""The rounds of `decode` alone, for benchmarks that do not time how a prompt is read."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from specjax import Drafter, Params
from specjax.speculation.rounds import step
from specjax.speculation.state import DecodeState


def finish(params: Params, state: DecodeState, drafter: Drafter) -> DecodeState:
    """Runs rounds until all rows are finished. Call it in a compiled function."""
    done: DecodeState = lax.while_loop(
        lambda state: ~jnp.all(state.finished),
        lambda state: step(params, state, drafter)[0],
        state,
    )
    return done
