"""Programs that are compiled ahead do what they do otherwise."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from specjax.generation.ahead import Ahead

SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)


def test_a_program_compiled_ahead_is_not_compiled_again() -> None:
    traced = []

    @partial(jax.jit, static_argnames="times")
    def scaled(model: float, x: jax.Array, times: int) -> jax.Array:
        traced.append(times)
        return model * x * times

    ahead = Ahead()
    assert ahead.compile(scaled, 2.0, SHAPE, times=3).shape == (3,)
    assert traced == [3]
    for number in range(2):
        assert ahead.run(scaled, 2.0, jnp.ones(3), times=3).tolist() == [6, 6, 6], number
    assert traced == [3]
    assert ahead.run(scaled, 2.0, jnp.ones(3), times=4).tolist() == [8, 8, 8]
    assert traced == [3, 4]
    ahead.end()
    with pytest.raises(RuntimeError, match="no more programs"):
        ahead.compile(scaled, 2.0, SHAPE, times=5)
    assert ahead.run(scaled, 2.0, jnp.ones(3), times=3).tolist() == [6, 6, 6]
