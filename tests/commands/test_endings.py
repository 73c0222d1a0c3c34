"""A command ends at once, with the right status and at most one line about it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

COMMAND = [sys.executable, "-m", "specjax.cli"]
GENERATE = [*COMMAND, "generate", "Once upon a time", "--max-new-tokens", "400"]
WRITING = """
import sys, time
from pathlib import Path
from specjax.files import interruption
from specjax.files.atomic_directory import check_new, replacing

interruption.listen("program")

class Finalized:
    def __del__(self):  # Python prints an exception in here and goes on
        print("begun", flush=True)
        time.sleep(60)

kept = interruption.unfinished(lambda: "all is kept")
with replacing(Path(sys.argv[1]), check_new) as directory, kept:
    (directory / "part").write_text("half")
    each = Finalized()
    del each
"""
REMAKING = """
import sys, threading, time
from pathlib import Path
from specjax.files import interruption
from specjax.files.atomic_directory import check_new, replacing

interruption.listen("program")

def remake(part):
    while True:
        part.mkdir(parents=True, exist_ok=True)

late = interruption.unfinished(lambda: time.sleep(0.1))  # undone after the directory
with late, replacing(Path(sys.argv[1]), check_new) as directory:
    for name in "abc":
        threading.Thread(target=remake, args=(directory / name,), daemon=True).start()
    print("begun", flush=True)
    time.sleep(60)
"""
FORKING = """
import os, time
from specjax.files import interruption

os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # the signal comes before all else
interruption.listen("program")
child = os.fork()
if child:
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(60)
"""


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """The status and the standard error of a process that is told to end."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


@pytest.mark.parametrize("moment", ["importing", "loading", "decoding"])
def test_ctrl_c_ends_a_command_at_any_moment(moment: str) -> None:
    process = start(GENERATE)
    assert process.stdout is not None
    if moment == "decoding":
        assert process.stdout.read(20).startswith("Once upon a time")
    else:
        time.sleep(0.4 if moment == "importing" else 2)
    assert ended(process, signal.SIGINT) == (130, "specjax: interrupted\n")


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGINT, 130, "program: interrupted; all is kept\n"),
        (signal.SIGTERM, 143, "program: terminated; all is kept\n"),
        (signal.SIGHUP, 129, "program: the terminal was closed; all is kept\n"),
    ],
)
def test_the_unfinished_is_undone(tmp_path: Path, number: int, status: int, line: str) -> None:
    """Also where an exception would be lost."""
    process = start([sys.executable, "-c", WRITING, str(tmp_path / "out")])
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    assert len(list(tmp_path.iterdir())) == 1
    assert ended(process, number) == (status, line)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_threads_make_again_is_removed(tmp_path: Path) -> None:
    process = start([sys.executable, "-c", REMAKING, str(tmp_path / "out")])
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    assert ended(process, signal.SIGINT) == (130, "program: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_a_signal_that_the_parent_ignores_stays_ignored(tmp_path: Path) -> None:
    script = WRITING.replace("sleep(60)", "sleep(0.5)")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = start([sys.executable, "-c", script, str(tmp_path / "out")])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    assert ended(process, signal.SIGHUP) == (0, "")
    assert (tmp_path / "out" / "part").read_text() == "half"


def test_a_forked_child_ends_as_any_process() -> None:
    quiet = ("-W", "ignore::DeprecationWarning")  # Python 3.12 warns of forks beside threads
    process = start([sys.executable, *quiet, "-c", FORKING])
    assert process.stdout is not None
    child = int(process.stdout.readline())
    subprocess.run(["kill", "-TERM", str(child)], check=True)
    assert int(process.stdout.readline()) == -signal.SIGTERM
    assert ended(process, signal.SIGINT) == (130, "program: interrupted\n")


def test_a_closed_pipe_ends_a_command() -> None:
    process = start(GENERATE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_a_full_disk_below_the_output_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [*COMMAND, "plan", "memory"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert found.stderr.startswith("specjax: ") and found.stderr.count("\n") == 1
    assert "No space left" in found.stderr and found.returncode == 1
