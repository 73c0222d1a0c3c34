"""`specjax serve` as a process: it starts, is told to end in the middle of a stream, and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import ROOT

SERVE = [
    sys.executable, "-m", "specjax.cli", "serve", "tiny", "--port", "0", "--rows", "1",
    "--context", "500", "--drafter", "autoregressive", "--max-logprobs", "0", "--grace", "60",
]  # fmt: skip
BODY = {"model": "tiny", "prompt": "A", "max_tokens": 400, "temperature": 0, "stream": True}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the process logs: a file, because a pipe that nobody reads fills up and stops it."""
    return tmp_path / "log"


@pytest.fixture
def served(log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            SERVE, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "SPECJAX_API_KEY": ""},
        )  # fmt: skip
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail(log.read_text())
        yield process, found[0]
    finally:
        process.kill()
        process.wait()


def events(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line]


def test_sigterm_lets_a_stream_finish(served, log: Path) -> None:
    process, url = served
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        rest = events(lines)
    assert answer.status_code == 200 and first.startswith("data: ")
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] in ("stop", "length")
    assert process.wait(timeout=30) == 0, log.read_text()
    (line,) = log.read_text().splitlines()
    logged = json.loads(line)
    assert logged["completion_tokens"] > 0 and "prompts" not in logged


@pytest.mark.exhaustive
def test_memory_and_files_stay_the_same(served) -> None:
    process, url = served
    watched = psutil.Process(process.pid)
    seen = []
    with httpx.Client(timeout=60) as client:
        for number in range(1200):
            body = {**BODY, "max_tokens": 4, "seed": number, "temperature": 1, "stream": False}
            assert client.post(f"{url}/v1/completions", json=body).status_code == 200
            if number % 400 == 399:
                seen.append((watched.memory_info().rss, watched.num_fds()))
    (_, files), (before, same), (after, last) = seen
    assert files == same == last
    assert after < before * 1.03
