"""Runs a program that a model wrote, in a process that can do little harm.

Everywhere: a process group of its own that is killed as a whole, an empty folder to work in, no
input, no environment, and limits on seconds, memory, file sizes and processes; on Linux it starts
no other process at all. Where Linux allows namespaces too (`Outcome.isolated`), it has no network,
no power over other processes, and no file to write to but those in its folder. It is a fence
against accidents, such as code that removes files or never ends, and no prison for an attacker.
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
    """What became of a program.

    passed: it ran to its end without an exception.
    reason: the exception's name and message, or what stopped the program; "" where it passed.
    isolated: namespaces kept it from the network and from other files.
    """

    passed: bool
    reason: str
    isolated: bool


def run(program: str, *, seconds: int = 5, megabytes: int = 512) -> Outcome:
    """Runs a Python program.

    Args:
      program: its source.
      seconds: of processor time, and of time on the clock.
      megabytes: of memory per process, and a sixteenth of them of files.

    Returns:
      What became of it. A program that leaves by itself, as by `sys.exit`, has not passed.
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
    """From the keeper's lines: whether namespaces were made, and the program's own last word."""
    first, _, word = report.decode(errors="replace").partition("\n")
    isolated = first == "isolated"
    if not word:
        return Outcome(False, f"stopped: more than {seconds} s, or it left by itself", isolated)
    reason = json.loads(word)
    return Outcome(reason == "", reason, isolated)
