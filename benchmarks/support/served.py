"""`specjax serve` or llama.cpp's server in a process of its own, and clients that time it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import aiohttp
import httpx
import psutil

from benchmarks.support.tables import ROOT
from checkpoints_tools.sources import locate

PATIENCE = 600.0  # seconds for an answer


class Served(NamedTuple):
    """A running server."""

    url: str
    process: psutil.Process

    def metric(self, name: str) -> float:
        """The sum of one of its counts."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        chosen = [x for x in lines if re.match(rf"specjax:{name}[ {{]", x)]
        return sum(float(x.rsplit(" ", 1)[1]) for x in chosen)


class Heard(NamedTuple):
    """The answer that a client heard.

    text: the output, or its beginning where the client has left.
    first: seconds to the first text.
    gaps: seconds between two events with text.
    tokens: tokens of the output; 0 where the client has left.
    whole: whether the client has stayed.
    """

    text: str
    first: float
    gaps: list[float]
    tokens: int
    whole: bool


@contextlib.contextmanager
def served(arguments: Sequence[str]) -> Iterator[Served]:
    """Starts a server, waits until it listens, and ends it by SIGTERM."""
    command = [sys.executable, "-m", "specjax.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        address = next(
            filter(None, (re.search(r"http://[\d.:]+", line) for line in process.stdout))
        )
        yield Served(address[0], psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


@contextlib.contextmanager
def llama_cpp_served(
    program: str, model: str, rows: int, context: int, *more: str
) -> Iterator[Served]:
    """Starts llama.cpp's `llama-server` on a GGUF file, without a memory of prompts.

    program: the path of `llama-server`. rows, context: requests at a time, and tokens of each.
    more: other options of the program.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            program, "--model", str(locate(model)), "--port", str(port), "--parallel", str(rows),
            "--ctx-size", str(rows * context), "--no-cache-prompt", "--cache-ram", "0",
            "--threads", str(psutil.cpu_count()), *more,
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while not _listens(url):
            assert process.poll() is None, f"{program} ended with {process.returncode}"
            time.sleep(0.1)
        yield Served(url, psutil.Process(process.pid))
    finally:
        process.kill()
        process.wait()


def _listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


@contextlib.asynccontextmanager
async def clients(served: Served, keep_alive: bool = True) -> AsyncIterator[aiohttp.ClientSession]:
    """Connections without a limit of their number, which cost the server's cores little.

    keep_alive: whether a connection serves several requests. llama.cpp's server may close it.
    """
    async with aiohttp.ClientSession(
        served.url,
        connector=aiohttp.TCPConnector(limit=0, force_close=not keep_alive),
        timeout=aiohttp.ClientTimeout(PATIENCE),
    ) as client:
        yield client


async def hear(
    client: aiohttp.ClientSession, body: dict[str, Any], leave_after: int | None = None
) -> Heard:
    """Asks for a completion as a stream. leave_after: events after which the client leaves."""
    begin = before = time.perf_counter()
    first, gaps, text, tokens = 0.0, list[float](), "", 0
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        events = 0
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event, now = json.loads(line.removeprefix(b"data: ")), time.perf_counter()
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            tokens = (event.get("usage") or {}).get("completion_tokens", 0)
            for choice in event["choices"]:
                if not choice["text"]:
                    continue
                text += choice["text"]
                if first:
                    gaps.append(now - before)
                first, before = first or now - begin, now
            events += 1
            if events == leave_after:
                return Heard(text, first, gaps, 0, False)
    return Heard(text, first, gaps, tokens, True)


async def receive(client: aiohttp.ClientSession, body: dict[str, Any]) -> Heard:
    """Asks for a completion as one object."""
    begin = time.perf_counter()
    async with client.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        found = await answer.json()
    seconds, tokens = time.perf_counter() - begin, found["usage"]["completion_tokens"]
    return Heard(found["choices"][0]["text"], seconds, [], tokens, True)


async def crowd(
    client: aiohttp.ClientSession, bodies: Sequence[dict[str, Any]], count: int,
    ask: Callable[[aiohttp.ClientSession, dict[str, Any]], Awaitable[Heard]] = hear,
) -> tuple[list[Heard], float]:  # fmt: skip
    """Asks for all from `count` clients at a time. Returns what they heard, and the seconds."""
    free, begin = asyncio.Semaphore(count), time.perf_counter()

    async def one(body: dict[str, Any]) -> Heard:
        async with free:
            return await ask(client, body)

    heard = await asyncio.gather(*map(one, bodies))
    return heard, time.perf_counter() - begin
