"""A server whose model is divided over two hosts, here two processes with one device each."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest

import specjax
from specjax.commands.meshes import join
from specjax.generation.batch_rows import Waiting
from specjax.generation.kinds import Kind
from specjax.serving import hosts
from specjax.serving.asks import arrays_of
from specjax.serving.errors import HostGoneError
from tests.conftest import ROOT
from tests.support.live_server import sampling_of

SERVE = [
    sys.executable, "-m", "specjax.cli", "serve", "--port", "0", "--rows", "2", "--name", "tiny",
    "--context", "192", "--drafter", "prompt-lookup", "--tensor", "2", "--processes", "2",
]  # fmt: skip
REQUESTS: list[dict[str, object]] = [
    {"prompt": "The old king", "temperature": 0},
    {"prompt": "A", "temperature": 0.9, "seed": 11},
    {"prompt": "A fox " * 30, "temperature": 0.9, "seed": 12, "top_p": 0.8},
    {"prompt": "One day", "temperature": 0, "presence_penalty": 1.0},
]


def test_a_prompt_is_told_as_it_is() -> None:
    sampling = specjax.Sampling(temperature=0.3, top_k=7, logit_bias={5: -100.0, 9: 0.1})
    tokens, key = np.array([3, 1, 2], np.int32), jax.random.key(4)[None]
    prompt = Waiting(6, tokens, 20, key, arrays_of(sampling), None, Kind.SCORED, True)
    told = hosts._prompt(hosts._written(prompt))
    assert jax.tree.structure(told) == jax.tree.structure(prompt)
    for expected, found in zip(jax.tree.leaves(prompt), jax.tree.leaves(told), strict=True):
        np.testing.assert_array_equal(_data(expected), _data(found), strict=True)


def _data(leaf: Any) -> Any:
    """A random key as the numbers that it holds."""
    is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def test_calls_are_told_until_a_host_is_gone() -> None:
    here, there = Pipe()
    followers, leader = hosts.Followers([here]), hosts.Leader(there)
    followers.tell("fill")
    followers.tell("launch", 3, 16)
    followers.end()
    assert list(leader.calls()) == [["fill"], ["launch", 3, 16]]
    here.send_bytes(b'["__init__", 1]')
    with pytest.raises(ValueError, match="unknown call"):
        next(leader.calls())
    there.close()
    with pytest.raises(HostGoneError, match="another host of the mesh is gone"):
        followers.tell("fill")
    followers.end()


def test_the_first_host_is_gone() -> None:
    here, there = Pipe()
    here.close()
    with pytest.raises(HostGoneError, match="the first host of the mesh is gone"):
        next(hosts.Leader(there).calls())


def test_hosts_meet_although_a_stranger_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers, leaders = list[socket.socket](), ThreadPoolExecutor(1)

    def invite(invitation: np.ndarray) -> np.ndarray:
        key, port = invitation[:32].tobytes(), int.from_bytes(invitation[32:].tobytes(), "big")
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        found.append(leaders.submit(Client, ("127.0.0.1", port), authkey=key))
        return invitation

    found = list[Any]()
    monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", invite)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    meeting = threading.Thread(target=lambda: found.append(hosts.meet("127.0.0.1")), daemon=True)
    meeting.start()
    meeting.join(30)
    leader, followers = found
    followers.tell("fill")
    followers.end()
    assert list(hosts.Leader(leader.result(30)).calls()) == [["fill"]]
    leaders.shutdown()
    strangers[0].close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"process": 0}, "go with --coordinator HOST:PORT"),
        ({"coordinator": "host"}, "--coordinator must be HOST:PORT, got 'host'"),
        ({"coordinator": "host:0"}, "--coordinator must be HOST:PORT, got 'host:0'"),
        ({"coordinator": "host:99", "processes": 2}, "--process K with 0 ≤ K < N, got 2 and None"),
        ({"coordinator": "host:99", "processes": 2, "process": 2}, "0 ≤ K < N, got 2 and 2"),
    ],
)
def test_hosts_that_cannot_meet(given: dict[str, Any], message: str) -> None:
    options = {"coordinator": None, "processes": None, "process": None, **given}
    with pytest.raises(ValueError, match=re.escape(message)):
        join(argparse.Namespace(**options))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer: it is compiled sooner."""
    tiny, path = specjax.load("tiny"), tmp_path_factory.mktemp("model") / "one-layer"
    config = dataclasses.replace(tiny.config, num_layers=1)
    one = dataclasses.replace(tiny, layers=tiny.layers[:1], config=config)
    specjax.save(one, path, "tiny")
    return path


@pytest.fixture
def two_hosts(model: Path, tmp_path: Path) -> Iterator[tuple[list[subprocess.Popen[str]], str]]:
    """The processes, and the address of the first one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    processes = []
    for number in range(2):
        where = ["--process", str(number), "--coordinator", f"127.0.0.1:{port}"]
        with (tmp_path / f"log{number}").open("w") as errors:
            processes.append(
                subprocess.Popen(
                    [*SERVE, *where, str(model)],
                    cwd=ROOT,
                    env=environment,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            )
    try:
        for line in processes[0].stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("\n".join(path.read_text() for path in tmp_path.iterdir()))
        yield processes, found[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.exhaustive
def test_two_hosts_answer_as_one_until_one_dies(two_hosts, model: Path, tmp_path: Path) -> None:
    processes, url = two_hosts
    params, tokenizer = specjax.load(model), specjax.load_tokenizer(model)

    def answer(fields: dict[str, object]) -> str:
        body = {"model": "tiny", "max_tokens": 40, **fields}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        return answer.json()["choices"][0]["text"]

    body = {"model": "tiny", "prompt": "Gone", "max_tokens": 150, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())  # and goes away
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(answer, REQUESTS))
    for fields, text in zip(REQUESTS, answers, strict=True):
        prompt = str(fields["prompt"])
        chosen = {k: v for k, v in fields.items() if k not in ("prompt", "seed")}
        sampling = sampling_of(chosen)
        key = None if sampling is None else jax.random.key(int(str(fields.get("seed", 0))))
        expected = specjax.generate(
            params, tokenizer, prompt, max_new_tokens=40, sampling=sampling, key=key,
            drafter=specjax.PromptLookup(),
        )  # fmt: skip
        assert text == expected.text, fields
    body = {"model": "tiny", "prompt": "The sea", "max_tokens": 1, "echo": True, "logprobs": 2}
    echoed = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert len(echoed["logprobs"]["tokens"]) > 2

    processes[1].kill()
    processes[1].wait()
    body = {"model": "tiny", "prompt": "The sea", "max_tokens": 50}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code in (500, 503)
    assert processes[0].wait(60) != 0
    assert "another host of the mesh is gone" in (tmp_path / "log0").read_text()
