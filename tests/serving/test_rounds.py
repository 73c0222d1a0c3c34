"""How many rounds the engine runs before it looks who came, who goes and who waits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specjax.generation.batch_rows import Waiting
from specjax.serving.asks import Ask
from specjax.serving.engine import Engine


def ask(**more: object) -> Ask:
    usual = {
        "tokens": np.ones(3, np.int32), "max_new_tokens": 9, "sampling": None, "seed": 0,
        "folds": (0,), "scored": False, "echoed": False, "stop": None, "stop_tokens": frozenset(),
        "send": print, "live": False,
    }  # fmt: skip
    return Ask(**(usual | more))


WHOLE, LIVE, STOPS = ask(), ask(live=True), ask(stop_tokens=frozenset({7}))


@pytest.mark.parametrize(
    ("asks", "outputs", "wanting", "rounds"),
    [
        ([WHOLE, WHOLE], [[], [5]], False, 16),  # nobody waits for their tokens
        ([WHOLE, LIVE], [[5], [5]], False, 5),  # 50 ms
        ([WHOLE, STOPS], [[5], [5]], False, 5),
        ([WHOLE, LIVE], [[5], []], False, 1),  # a stream has no token yet
        ([LIVE, WHOLE], [[5], []], False, 5),
        ([WHOLE, WHOLE], [[5], [5]], True, 1),  # a prompt waits for being read
        ([WHOLE], [[5]], False, 1),  # a row is free: 15 ms
    ],
)
def test_rounds_before_the_host_looks(asks, outputs, wanting: bool, rounds: int) -> None:
    prompts = {row: Waiting(row, one.tokens, 12, None, None) for row, one in enumerate(asks)}
    engine = SimpleNamespace(
        _open=dict(enumerate(zip(asks, outputs, strict=True))),
        _batch=SimpleNamespace(running=prompts, wanting=wanting),
        plan=SimpleNamespace(rows=2), _pace=0.01,
    )  # fmt: skip
    assert Engine._most_rounds(engine) == rounds


def test_the_device_runs_on_while_readers_are_told(live, client, monkeypatch) -> None:
    engine, ahead = live.engine, list[bool]()
    tell = engine._tell

    def spy(*gained: object) -> None:
        ahead.append(engine._moment is not None)
        tell(*gained)

    monkeypatch.setattr(engine, "_tell", spy)
    client.completions.create(model="tiny", prompt="A", max_tokens=40, temperature=0)
    assert any(ahead)
    assert not ahead[-1], "rounds began behind the last one, before its row was taken out"
