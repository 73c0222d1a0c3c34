"""Runs commands that write in separate processes and ends them at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import psutil

from checkpoints_tools import checkpoint
from tests.conftest import ROOT

SPECJAX = (sys.executable, "-m", "specjax.cli")
_PATIENCE = 120.0  # seconds for a command to end
_GRACE = 3.0  # seconds for its child processes to end
_TIMES = "second|speedup|ratios"  # in names of fields


class Ended(NamedTuple):
    """The exit status, standard error, and seconds until the signal or the end."""

    status: int
    errors: str
    lasted: float


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that writes.

    folder: the folder that it runs in, which receives its output and leftovers.
    arguments: the whole command line.
    output: the path of its output in the folder.
    """

    folder: Path
    arguments: tuple[str, ...]
    output: str

    @property
    def target(self) -> Path:
        return self.folder / self.output

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Starts the command, and kills it at the end of the block."""
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            self.arguments, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def run(self) -> tuple[float, float]:
        """Runs it to its end. Returns the seconds until it first wrote, and until its end."""
        before, begin = self.look(), time.perf_counter()
        with self.running() as process:
            while self.look() == before and process.poll() is None:
                time.sleep(0.002)
            wrote = time.perf_counter() - begin
            _, errors = process.communicate(timeout=_PATIENCE)
        assert process.returncode == 0, errors
        return wrote, time.perf_counter() - begin

    def kill(self, number: int, delay: float, *, writing: bool) -> Ended:
        """Sends it a signal some seconds after its start, or after it began to write.

        Its child processes must have ended too.
        """
        before = self.look()
        with self.running() as process:
            while writing and self.look() == before and process.poll() is None:
                time.sleep(0.001)
            begin = time.perf_counter()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(delay)
            lasted = time.perf_counter() - begin
            children = _children(process.pid)
            process.send_signal(number)
            _, errors = process.communicate(timeout=_PATIENCE)
        _, alive = psutil.wait_procs(children, timeout=_GRACE)
        assert not alive, alive
        return Ended(process.returncode, errors, lasted)

    def look(self) -> list[tuple[str, int]]:
        """The files in the folder, with their modification times."""
        with contextlib.suppress(FileNotFoundError):  # removed during the walk
            return sorted((str(each), each.stat().st_mtime_ns) for each in self.folder.rglob("*"))
        return []

    def hidden(self) -> list[Path]:
        """The hidden files beside the output."""
        beside = self.target.parent
        return list(beside.glob(".*")) if beside.is_dir() else []

    def content(self) -> str | None:
        """A digest of the output; None if it does not exist."""
        return _digest(self.target) if self.target.exists() else None

    def clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _digest(path: Path) -> str:
    """A digest of a checkpoint's numbers, because its files may differ; else of all files."""
    found = hashlib.sha256()
    if checkpoint.is_checkpoint(path):
        params = checkpoint.load(path)
        for leaf in jax.tree.leaves(params):
            found.update(np.ascontiguousarray(leaf).tobytes())
        return f"{jax.tree.structure(params)} {found.hexdigest()}"
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            content = _without_times(file.read_bytes())
            found.update(f"{file.relative_to(path)} {len(content)} ".encode() + content)
    return found.hexdigest()


def _without_times(content: bytes) -> bytes:
    """The contents of a file; those of a benchmark's results without what another run measures."""
    if not content.startswith(b'{"specjax_bench"'):
        return content
    cells = map(json.loads, content.splitlines())
    return json.dumps([
        {name: value for name, value in cell.items() if not re.search(_TIMES, name)}
        for cell in cells
    ]).encode()  # fmt: skip
