"""Judges programs written by a model, in processes that cannot reach this process or its user.

The program runs in a process of its own. Its tests run in another process, which asks the first for
the results of calls and receives copies of plain values. The program cannot reach the process that
makes the verdict. Namespaces or Landlock, and a filter of system calls, keep both processes from
files, the network and other processes. Where Linux has neither, nothing runs unless the caller
insists. SECURITY.md has a table of the restrictions by system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_START = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from box.keeper import main
del sys.path[0]
main()
"""
_LIBRARIES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store",
    "/etc/ld.so.cache", "/usr/share/zoneinfo",
)  # fmt: skip
_GRACE = 10.0  # seconds for the keeper to start, and to clear up
_LONGEST_REPORT = 4096  # bytes


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and its tests.

    source: the program.
    tests: the source of its tests, which fail with an exception.
    names: the program's names that the tests use.
    given: source that runs before the tests and gives them further names, without the program's.
    """

    source: str
    tests: str = ""
    names: tuple[str, ...] = ()
    given: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a program.

    passed: whether the program and its tests ran to their ends without an exception.
    reason: the exception's name and message, or why it was stopped; "" where it passed.
    walls: what held the program: "namespaces", "landlock", or "none" where `unsafe` insisted.
    """

    passed: bool
    reason: str
    walls: str


def run(
    program: Program, *, seconds: int = 5, megabytes: int = 512, unsafe: bool = False
) -> Outcome:
    """Runs a program and its tests.

    Args:
      program: the program.
      seconds: limit of processor time of each of the two processes; one second more of elapsed
        time.
      megabytes: limit of memory of each process; files may hold a sixteenth of it.
      unsafe: run the program where nothing holds it too.

    Returns:
      The outcome. A program that exits by itself, as by `sys.exit`, has not passed.

    Raises:
      ValueError: this system has nothing that holds the program, and `unsafe` is not set.
    """
    report = _report(program, seconds, megabytes, unsafe)
    walls, _, verdict = report.decode(errors="replace").partition("\n")
    if walls == "refused":
        raise ValueError(
            f"programs that a model wrote are not run here, because this system does not allow "
            f"{verdict}: use another system, or insist with unsafe=True (--unsafe)"
        )
    if not verdict:
        return Outcome(False, "stopped: the sandbox gave no verdict", "none")
    return Outcome(verdict == "+", verdict[1:], walls)


def check(*, unsafe: bool = False) -> None:
    """Runs a program without harm, to see that programs can be judged here.

    Raises:
      ValueError: as `run`.
      OSError: the sandbox does not work on this system.
    """
    program = Program("import heapq\ndef f(): return 1", "assert f() == 1", ("f",))
    outcome = run(program, unsafe=unsafe)
    if not outcome.passed:
        raise OSError(f"the sandbox does not work on this system: {outcome.reason}")


def _report(program: Program, seconds: int, megabytes: int, unsafe: bool) -> bytes:
    """The keeper's report; empty if the keeper ends without one."""
    source = program.source.encode("utf-8", "surrogatepass")
    tests = {"tests": program.tests, "names": program.names, "given": program.given}
    packages = site.getsitepackages()
    standard = [str(Path(os.__file__).parent), str(Path(sys.base_prefix, "lib"))]
    libraries = sorted({*_LIBRARIES, *standard, *packages})
    order = json.dumps(
        [os.getpid(), tempfile.gettempdir(), libraries, packages, len(source), seconds, megabytes,
         unsafe]
    )  # fmt: skip
    with tempfile.TemporaryFile() as file:
        file.write(source + json.dumps(tests).encode())
        file.flush()
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, order],
            stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={},
            start_new_session=True,
        )  # fmt: skip
    assert keeper.stdout is not None
    report, end = b"", time.monotonic() + seconds + _GRACE
    try:
        with keeper.stdout as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while len(report) < _LONGEST_REPORT and selector.select(end - time.monotonic()):
                part = os.read(pipe.fileno(), _LONGEST_REPORT)
                if not part:
                    break
                report += part
    finally:
        with contextlib.suppress(OSError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
    return report
