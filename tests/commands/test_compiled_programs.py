"""A second process finds the programs that the first one compiled; users can say no, or where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.files.user_cache import kept_files, removes_broken
from tests.support.covering import left_out

DECODES = """
from functools import partial

import jax

found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
import specjax

# A program of the user's own, which JAX keeps; it compiles for longer than those that are not kept.
decode = jax.jit(partial(specjax.decode, max_new_tokens=4, drafter=specjax.Autoregressive()))
result = decode(specjax.load("tiny"), jax.numpy.array([[1, 2, 3]]))
print("/jax/compilation_cache/cache_hits" in found, result.tokens.tolist())
"""
TRACES = """
import jax

traced = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, fun_name="", **__: traced.append(fun_name) if "trace" in event else None
)
import specjax
from specjax.drafting import Autoregressive


@jax.tree_util.register_dataclass
class Own(Autoregressive):
    pass


params = specjax.load("tiny")
drafter = {drafter}
result = specjax.decode(params, [1, 2, 3], max_new_tokens=4, drafter=drafter)
rounds = list(specjax.stream(params, [1, 2, 3], max_new_tokens=4, drafter=drafter))
found = "_decode" in traced, "_start" in traced, "run_round" in traced
print(*found, result.tokens.tolist(), sum((each.tokens for each in rounds), []))
"""
SAYS_WHERE = """
import jax
import specjax

specjax.Sampling
print(jax.config.jax_compilation_cache_dir)
"""
NOT_INHERITED = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", "XLA_FLAGS")


def _printed(program: str, cache: Path, **environment: str) -> str:
    inherited = {name: each for name, each in os.environ.items() if name not in NOT_INHERITED}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "XDG_CACHE_HOME": str(cache), **environment},
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


def test_the_second_process_finds_them(tmp_path: Path) -> None:
    first, second = (_printed(DECODES, tmp_path) for _ in range(2))
    assert first.startswith("False ")
    assert second == first.replace("False", "True")
    assert list((tmp_path / "specjax" / "compiled").iterdir())


@pytest.mark.parametrize("drafter", ["Autoregressive()", left_out("specjax.Auto()")])
def test_the_second_process_traces_nothing(drafter: str, tmp_path: Path) -> None:
    program = TRACES.format(drafter=drafter)
    first, second = (_printed(program, tmp_path) for _ in range(2))
    assert first.startswith("True True True ")
    assert second == first.replace("True", "False")


@pytest.mark.exhaustive
def test_a_drafter_of_the_callers_own_is_traced(tmp_path: Path) -> None:
    for _ in range(2):
        assert _printed(TRACES.format(drafter="Own()"), tmp_path).startswith("True True True ")


@pytest.mark.exhaustive
def test_a_damaged_program_is_compiled_again(tmp_path: Path) -> None:
    program = TRACES.format(drafter="Autoregressive()")
    first = _printed(program, tmp_path)
    for file in (tmp_path / "specjax" / "programs").iterdir():
        file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    assert _printed(program, tmp_path) == first


def test_programs_that_cannot_be_read_go(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = kept_files("compiled")
    for name in ("jit_reshape-01ab-cache", "jit_reshape-02cd-cache", "jit_add-03ef-cache"):
        (place / name).write_bytes(b"a part")
    warning = "Error reading persistent compilation cache entry for 'jit_reshape': error: Error -5"
    assert removes_broken(warning)
    assert [file.name for file in place.iterdir()] == ["jit_add-03ef-cache"]
    assert not removes_broken("another warning")


@pytest.mark.exhaustive
def test_a_program_that_was_kept_in_part_is_kept_anew(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specjax.cli", "generate", "Once", "--max-new-tokens", "2",
               "--drafter", "autoregressive"]  # fmt: skip
    inherited = {name: each for name, each in os.environ.items() if name not in NOT_INHERITED}
    environment = {**inherited, "XDG_CACHE_HOME": str(tmp_path)}
    for damaged in (False, True):
        files = list((tmp_path / "specjax").glob("*/*"))
        for file in files if damaged else ():
            file.write_bytes(file.read_bytes()[:50])
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert said.stderr == ""
        kept = [file for file in files if file.exists()]  # not one that now compiled at once
        assert bool(kept) == damaged and all(file.stat().st_size > 50 for file in kept)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, "{cache}/specjax/compiled"),
        ({"JAX_COMPILATION_CACHE_DIR": "/elsewhere"}, "/elsewhere"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, "None"),
    ],
)
def test_users_decide(tmp_path: Path, environment: dict[str, str], place: str) -> None:
    assert _printed(SAYS_WHERE, tmp_path, **environment) == place.format(cache=tmp_path)


@pytest.mark.exhaustive
def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert _printed(SAYS_WHERE, tmp_path / "file") == "None"
