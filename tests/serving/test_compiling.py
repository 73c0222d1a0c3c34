"""The first structured output waits for its programs; other outputs do not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from specjax.generation import kinds
from specjax.generation.kinds import GuidedPrograms, Kind

CHOICE: dict[str, Any] = {
    "model": "tiny", "prompt": "A", "max_tokens": 8, "temperature": 0,
    "extra_body": {"guided_regex": "yes|no"},
}  # fmt: skip


@pytest.fixture
def held_back(live, monkeypatch) -> threading.Event:
    """Begins with nothing compiled, and compiles nothing before this is set."""
    may, compile_ahead = threading.Event(), kinds.compile_ahead

    def wait(*args: Any) -> None:
        assert may.wait(60)
        compile_ahead(*args)

    monkeypatch.setattr(kinds, "compile_ahead", wait)
    fresh = GuidedPrograms()
    live.engine._guided = live.engine._batch.guided = fresh
    live.engine._compiling = None
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
        while len(live.engine._held) < 2:
            time.sleep(0.01)
        for _ in range(3):
            assert tokens_per_stream(client) > 1
        assert not any(each.done() for each in waiting)
        held_back.set()
        seen = 0
        while not all(each.done() for each in waiting):
            seen += tokens_per_stream(client)
        assert seen > 0
        assert {each.result().choices[0].text for each in waiting} <= {"yes", "no"}
    assert live.engine._guided.least(Kind.GREEDY) in (Kind.GREEDY, Kind.PENALIZED)


@pytest.mark.exhaustive
def test_an_output_that_waits_for_programs_can_be_given_up(live, client, held_back) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**CHOICE, timeout=0.3)
    while live.engine.open:
        time.sleep(0.01)
    held_back.set()
    assert client.completions.create(**CHOICE).choices[0].text in ("yes", "no")


@pytest.mark.exhaustive
def test_programs_that_cannot_be_compiled_end_what_waits_for_them(
    live, client, held_back, monkeypatch
) -> None:
    held_back.set()
    with monkeypatch.context() as broken:
        broken.setattr(kinds, "less_of", None)  # so that the compiling thread fails
        with pytest.raises(openai.InternalServerError, match="cannot be compiled"):
            client.completions.create(**CHOICE)
    assert client.completions.create(**CHOICE).choices[0].text in ("yes", "no")
