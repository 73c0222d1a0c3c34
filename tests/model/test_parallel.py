"""Many devices give what one gives, bit for bit: `on_devices.py` and `on_processes.py` run apart,
because the number of devices is fixed when JAX starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.covering import representatives
from tests.support.on_devices import CASES


def run(module: str, devices: int, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def reports(output: str) -> list[dict[str, Any]]:
    """The lines of JSON among what a process printed; its libraries print as well."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Returns the error of every selected case, or None."""
    items = [x for x in request.session.items if x.nodeid.startswith(request.node.nodeid)]
    names = [x.callspec.params["name"] for x in items if "outcomes" in x.fixturenames]
    output, errors = run("tests.support.on_devices", 8, *names).communicate()
    found = {line["case"]: line["error"] for line in reports(output)}
    return {name: found.get(name, f"it was not reached: {errors[-2000:]}") for name in CASES}


@pytest.mark.parametrize("name", representatives(CASES, "tensor 8", "data 2 × tensor 4"))
def test_eight_devices(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.exhaustive
def test_two_processes() -> None:
    """Both have the outputs of one device; when one is killed, the other ends with an error."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [run("tests.support.on_processes", 2, port, str(number)) for number in range(2)]
    killed, left = processes[1], processes[0]
    try:
        output, errors = killed.communicate()
        assert killed.returncode == -signal.SIGKILL, errors[-2000:]
        expected = [{"decode": [2, 2]}, {"decode_many": [2, 2]}, {"decode": [1, 4]}]
        assert reports(output) == expected
        error = next((line for line in left.stderr if "JaxRuntimeError" in line), "")
        assert re.search(r"Connection \w+ by peer", error), error
        left.kill()  # it would wait a minute for the other one before it ends
        assert reports(left.stdout.read()) == expected
    finally:
        for process in processes:
            process.kill()
