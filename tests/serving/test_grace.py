"""The end of a server while an output takes longer than anybody wants to wait."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest

import specjax
from specjax.serving.asks import Plan
from tests.serving.conftest import client_of
from tests.support.live_server import Live, live_server

pytestmark = pytest.mark.exhaustive
ROUND = 0.2  # seconds, so that the output takes 50


@pytest.fixture
def slow(request, params, tokenizer) -> Iterator[Live]:
    """A server with that many seconds of grace."""
    plan, drafter = Plan(rows=1, context=256, queue=1, logprobs=0), specjax.Autoregressive()
    with live_server(params, tokenizer, plan=plan, drafter=drafter, grace=request.param) as live:

        def one() -> int:
            time.sleep(ROUND)
            return 1

        live.engine._most_rounds = one
        yield live


def begun(client: openai.OpenAI) -> openai.Stream[openai.types.Completion]:
    """A long output, from its second token on."""
    stream = client.completions.create(
        model="tiny", prompt="A", max_tokens=250, temperature=0, stream=True
    )
    next(iter(stream))
    return stream


def assert_ended(live: Live) -> None:
    live.thread.join(20)
    assert not live.thread.is_alive()


@pytest.mark.parametrize("slow", [0.2], indirect=True)
def test_an_output_that_outlasts_the_grace_ends_with_an_error(slow) -> None:
    with client_of(slow) as client:
        stream = begun(client)
        slow.server.end_soon()
        with pytest.raises(openai.APIError, match="the server ends"):
            list(stream)
    assert_ended(slow)


@pytest.mark.parametrize("slow", [60], indirect=True)
def test_a_second_signal_ends_at_once(slow) -> None:
    with client_of(slow) as client:
        stream = begun(client)
        slow.server.end_soon()
        slow.server.end_soon()
        assert_ended(slow)
        stream.close()
