"""Programs that are compiled while others serve: narrower ones, and those of grammars, for which
the first structured output waits; other outputs do not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from specjax.generation import programs
from specjax.generation.kinds import Kind, Scope
from tests.support.live_server import until

CHOICE: dict[str, Any] = {
    "model": "tiny", "prompt": "A", "max_tokens": 8, "temperature": 0,
    "extra_body": {"guided_regex": "yes|no"},
}  # fmt: skip


@pytest.fixture
def held_back(live, monkeypatch) -> threading.Event:
    """Begins without programs of grammars, and compiles none before this is set."""
    may, compile_ahead = threading.Event(), programs.compile_ahead

    def wait(*args: Any) -> None:
        assert may.wait(60)
        compile_ahead(*args)

    monkeypatch.setattr(programs, "compile_ahead", wait)
    known = live.engine._programs
    known._compiled = frozenset(scope for scope in known._compiled if not scope.guided)
    return may


def tokens_per_stream(client: openai.OpenAI) -> int:
    stream = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=40, temperature=0, stream=True
    )
    return sum(bool(event.choices[0].text) for event in stream)


@pytest.mark.exhaustive
def test_others_go_on_while_programs_of_grammars_compile(live, client, held_back) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.completions.create, **CHOICE) for _ in range(2)]
        until(lambda: len(live.engine._held) == 2)
        for _ in range(3):
            assert tokens_per_stream(client) > 1
        assert not any(each.done() for each in waiting)
        held_back.set()
        seen = 0
        while not all(each.done() for each in waiting):
            seen += tokens_per_stream(client)
        assert seen > 0
        assert {each.result().choices[0].text for each in waiting} <= {"yes", "no"}
    assert live.engine._programs.have(Scope(4, Kind.PENALIZED, guided=True))


@pytest.mark.exhaustive
def test_an_output_that_waits_for_programs_can_be_given_up(live, client, held_back) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**CHOICE, timeout=0.3)
    until(lambda: not live.engine.open)
    held_back.set()
    assert client.completions.create(**CHOICE).choices[0].text in ("yes", "no")


@pytest.mark.exhaustive
def test_programs_that_cannot_be_compiled_end_what_waits_for_them(
    live, client, held_back, monkeypatch
) -> None:
    held_back.set()
    with monkeypatch.context() as broken:
        broken.setattr(programs, "less_of", None)  # so that the compiling thread fails
        with pytest.raises(openai.InternalServerError, match="cannot be compiled"):
            client.completions.create(**CHOICE)
    assert client.completions.create(**CHOICE).choices[0].text in ("yes", "no")


def test_fewer_rows_run_where_fewer_are_taken(live, client) -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    known, alone = live.engine._programs, Scope(1, Kind.GREEDY)
    compiled, known._compiled = known._compiled, frozenset({Scope(4, Kind.PENALIZED)})
    wide = client.completions.create(**asked).choices[0].text
    known._compiled |= compiled
    until(lambda: known.have(alone))
    scopes, launch = list[Scope](), live.engine._batch.launch

    def spy(*limits: int) -> Any:
        launched = launch(*limits)
        scopes.append(known.least(live.engine._batch._scope()))
        return launched

    live.engine._batch.launch = spy
    try:
        assert client.completions.create(**asked).choices[0].text == wide
    finally:
        del live.engine._batch.launch
    assert set(scopes) == {alone}
