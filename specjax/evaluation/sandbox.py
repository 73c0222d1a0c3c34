"""Runs a program that a model wrote, in a process that can do little harm.

On every system the program has its own process group, which is killed as a whole, an empty folder
to work in, no input, no environment, and limits on seconds, memory, file sizes and processes. On
Linux it cannot start another process. Where Linux also allows namespaces (`Outcome.isolated`), it
has no network, cannot signal other processes, and writes to its own folder only. The sandbox guards
against accidents, such as code that removes files or never ends; it does not stop an attacker.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_KEEPER = Path(__file__).with_name("sandbox_keeper.py")
_GRACE = 2.0  # seconds for the interpreters to start and the namespaces to be made


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a program.

    passed: whether it ran to its end without an exception.
    reason: the exception's name and message, or why it was stopped; "" where it passed.
    isolated: whether namespaces kept it from the network and from other files.
    """

    passed: bool
    reason: str
    isolated: bool


def run(program: str, *, seconds: int = 5, megabytes: int = 512) -> Outcome:
    """Runs a Python program.

    Args:
      program: its source.
      seconds: limit of processor time, and of elapsed time.
      megabytes: limit of memory per process; files may hold a sixteenth of it.

    Returns:
      The outcome. A program that exits by itself, as by `sys.exit`, has not passed.
    """
    with tempfile.TemporaryDirectory(prefix="specjax-sandbox-") as folder:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_KEEPER), folder, str(seconds), str(megabytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=folder, env={}, start_new_session=True,
        )  # fmt: skip
        try:
            report, _ = keeper.communicate(program.encode(), timeout=seconds + _GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(keeper.pid, signal.SIGKILL)
            report, _ = keeper.communicate()
        except BaseException:
            os.killpg(keeper.pid, signal.SIGKILL)
            raise
    return _outcome(report, seconds)


def _outcome(report: bytes, seconds: int) -> Outcome:
    """Reads the keeper's report: whether namespaces were made, and how the program ended."""
    first, _, last = report.decode(errors="replace").partition("\n")
    isolated = first == "isolated"
    if not last:
        return Outcome(False, f"stopped: more than {seconds} s, or it exited by itself", isolated)
    reason = json.loads(last)
    return Outcome(reason == "", reason, isolated)
