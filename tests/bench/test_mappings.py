"""Compiled programs are forgotten before the system's limit of mappings is reached."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

import jax
import pytest

from specjax.bench.mappings import forget_programs
from specjax.files import kept_programs


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


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_programs_that_were_loaded_from_files_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_programs, "place_of_programs", lambda: tmp_path)
    monkeypatch.setattr(kept_programs, "_compiled_here", set())
    loaded = []
    monkeypatch.setattr(kept_programs, "_loaded", lru_cache(lambda *_: loaded.append(1)))
    for _ in range(2):
        kept_programs.kept(jax.jit(jax.numpy.abs), jax.numpy.zeros(3))
        forget_programs(share=0.0)
    assert len(loaded) == 2
