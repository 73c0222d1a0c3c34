"""A server of the package on the loopback address, in threads of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

import specjax
from specjax.generation.request import Request
from specjax.generation.text import ToolTokenizer
from specjax.serving.app import Door, make_app
from specjax.serving.asks import Plan
from specjax.serving.engine import Engine
from specjax.serving.grammars import grammars_possible
from specjax.serving.metrics import Metrics
from specjax.serving.server import Server, make_server

TOKENS = "specjax:generation_tokens_total"  # the count of new tokens


class Live:
    """A running server. thread: in which it runs. url: its address, without a path."""

    def __init__(self, engine: Engine, server: Server, thread: threading.Thread, port: int) -> None:
        self.engine, self.server, self.thread, self.port = engine, server, thread, port
        self.url = f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def live_server(
    params: specjax.Params,
    tokenizer: ToolTokenizer,
    *,
    plan: Plan,
    drafter: specjax.Drafter | None = None,
    key: str | None = None,
    log_prompts: bool = False,
    grace: float = 5.0,
) -> Iterator[Live]:
    """Compiles, serves, and ends in order."""
    request = Request.make(params, drafter=drafter, constrained=grammars_possible(params))
    engine = Engine(params, request, plan, Metrics())
    engine.start()
    app = make_app(engine, tokenizer, Door("tiny", key=key, log_prompts=log_prompts))
    ready = threading.Event()
    server = make_server(app, engine, grace, ready.set)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        assert ready.wait(60)
        try:
            yield Live(engine, server, thread, listening.getsockname()[1])
        finally:
            if thread.is_alive():
                server.end_soon()
            thread.join()


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Waits for a condition, and fails where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.001)


def metrics(live: Live) -> dict[str, float]:
    """The counts that a server shows."""
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def sampling_of(fields: dict[str, Any]) -> specjax.Sampling | None:
    """The meaning of a request's fields in the library."""
    if fields == {"temperature": 0}:
        return None
    biases = {int(token): bias for token, bias in fields.get("logit_bias", {}).items()}
    greedy = {} if fields["temperature"] else {"temperature": 1.0, "top_k": 1}
    return specjax.Sampling(**{**fields, **greedy, "logit_bias": biases or None})
