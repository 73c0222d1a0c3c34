"""Compiled programs are forgotten before the system's limit of mappings is reached."""

from __future__ import annotations

import sys

import jax
import pytest

from specjax.bench.mappings import forget_programs


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_programs_are_forgotten_past_a_share() -> None:
    traced = []

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        traced.append(x.shape)
        return x + 1

    def traces(share: float) -> int:
        forget_programs(share)
        program(jax.numpy.zeros(3))
        return len(traced)

    assert [traces(1.0), traces(1.0), traces(0.0), traces(1.0)] == [1, 1, 2, 2]
