"""The sandbox against programs that do harm by accident."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from specjax.evaluation.sandbox import run

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="system calls are filtered on Linux")


@pytest.mark.parametrize(
    "program", ["x = 1", "import math\nassert math.pi > 3", "open('here', 'w').write('a')", ""]
)
def test_programs_that_pass(program) -> None:
    outcome = run(program)
    assert outcome.passed and outcome.reason == ""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit: 0"),  # leaving early proves nothing
        ("import os; os._exit(0)", "exited by itself"),
        ("import os; os.abort()", "exited by itself"),
        ("input()", "EOFError"),
        ("x = bytearray(10**11)", "MemoryError"),
        ("open('big', 'wb').write(bytes(10**8))", "File too large"),
        ("import os; assert not os.environ.get('HOME')\nraise KeyError('clean')", "KeyError"),
    ],
)
def test_programs_that_fail(program, reason) -> None:
    outcome = run(program)
    assert not outcome.passed and reason in outcome.reason


def test_what_is_printed_is_no_verdict() -> None:
    assert not run("print('isolated'); print('\"\"', flush=True); assert False").passed


# One spins, one sleeps: neither keeps the evaluation waiting.
@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(1000)"])
def test_programs_that_never_end(program) -> None:
    outcome = run(program, seconds=1)
    assert not outcome.passed and "more than 1 s" in outcome.reason


@LINUX
def test_a_fork_bomb_does_not_start() -> None:
    for program in (
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['ls'])",
    ):
        assert run(program).reason.startswith("PermissionError")
    threads = "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()"
    assert run(threads).passed


def test_isolated_programs_reach_nothing(tmp_path) -> None:
    if not run("").isolated:
        pytest.skip("no namespaces for unprivileged processes here")
    target = tmp_path / "kept"
    target.write_text("mine")
    for program in (
        f"open({str(target)!r}, 'w')", f"import os; os.remove({str(target)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
    ):  # fmt: skip
        assert "Read-only file system" in run(program).reason
    assert target.read_text() == "mine" and list(tmp_path.iterdir()) == [target]
    assert "OSError" in run("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)").reason
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert run(f"import os\nos.kill({other.pid}, 9)").reason.startswith("ProcessLookupError")
    time.sleep(0.1)
    assert other.poll() is None
    other.communicate(b"\n")
