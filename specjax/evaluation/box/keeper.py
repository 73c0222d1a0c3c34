"""The sandbox's first process: it builds the walls, starts the two others, and ends them in time.

Standard input is a file that holds the program and then the tests. Standard output gets one line,
the name of the walls or "refused", and then the verdict: "+", or "-" and why not.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import select
import signal
import site
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from . import landlock, limits, linux, namespaces, program_side, scratch, system_calls, tests_side

_LONGEST_VERDICT = 2000
_CRASHED = 255
_REST = 1  # seconds of elapsed time beyond those of processor time


class Order(NamedTuple):
    """An order to the keeper.

    parent: the process that asks.
    base: the folder of temporary files.
    libraries: files and folders that a program may read.
    packages: folders from which a program may import.
    length: the bytes of the program in standard input.
    seconds: limit of processor time of each process; elapsed time may be a second more.
    megabytes: limit of memory of each process.
    unsafe: whether a program runs where walls are missing.
    """

    parent: int
    base: str
    libraries: list[str]
    packages: list[str]
    length: int
    seconds: int
    megabytes: int
    unsafe: bool


class _Cell(NamedTuple):
    """The confinement of a process.

    walls: "namespaces", "landlock" or "none".
    filtered: whether its system calls are filtered.
    user: the user that it runs as.
    folder: where it starts.
    """

    walls: str
    filtered: bool
    user: int
    folder: str


def main() -> None:
    """Carries out the order in the first argument."""
    order = Order(*json.loads(sys.argv.pop()))
    linux.die_with(order.parent)
    # An attempt that fails may leave a process in some of the namespaces: another one makes it.
    child = _fork(_keep_in_namespaces, order, os.getpid())
    error = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if 0 < error < _CRASHED:
        walls = "landlock" if landlock.is_known() else "none"
        _keep(order, order.parent, walls, f"namespaces ({os.strerror(error)}) and Landlock")


def _keep_in_namespaces(order: Order, parent: int) -> None:
    try:
        namespaces.enter(order.base, order.libraries, order.megabytes // limits.FILES_SHARE)
    except OSError as error:
        os._exit(error.errno or errno.ENOSYS)
    _keep(order, parent, "namespaces")


def _keep(order: Order, parent: int, walls: str, missing: str = "") -> None:
    """Judges the program behind these walls, and reports."""
    filtered = system_calls.is_known()
    if not order.unsafe and (walls == "none" or not filtered):
        _report("refused", missing or "filters of system calls")
        return
    user = limits.least_user(order.libraries)
    linux.die_with(parent)
    linux.hide_memory()
    apart = walls == "namespaces"
    with nullcontext(namespaces.FOLDER) if apart else scratch.folder(order.base, user) as folder:
        verdict = _judge(order, _Cell(walls, filtered, user, folder))
        _report(walls if filtered else "none", verdict)


def _judge(order: Order, cell: _Cell) -> str:
    """The verdict, once both processes have ended."""
    end = time.monotonic() + order.seconds + _REST
    verdict, to_keeper = os.pipe()
    requests, to_program = os.pipe()
    replies, to_tests = os.pipe()
    keeper = os.getpid()
    children = [_fork(_test, order, cell, keeper, to_program, replies, to_keeper)]
    os.close(to_keeper)  # the program's process never has it
    if cell.walls == "namespaces":
        namespaces.number_children_anew()
    children.append(_fork(_run, order, cell, keeper, requests, to_tests))
    for descriptor in (requests, to_program, replies, to_tests):
        os.close(descriptor)
    try:
        return _read(verdict, end) or f"-stopped: more than {order.seconds} s"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _test(order: Order, cell: _Cell, keeper: int, *pipes: int) -> None:
    """The work of the tests' process."""
    to_program, replies, to_keeper = pipes
    tests = os.pread(0, os.fstat(0).st_size - order.length, order.length)
    _enter(order, cell, keeper, pipes)
    reason = tests_side.judge(tests, to_program, replies)
    text = "+" if reason is None else f"-{reason}"
    os.write(to_keeper, text.encode("utf-8", "backslashreplace"))


def _run(order: Order, cell: _Cell, keeper: int, *pipes: int) -> None:
    """The work of the program's process."""
    source = os.pread(0, order.length, 0)
    sys.path += order.packages
    site.setquit()  # `exit` and `quit`
    _enter(order, cell, keeper, pipes)
    program_side.serve(source, *pipes)


def _enter(order: Order, cell: _Cell, keeper: int, pipes: tuple[int, ...]) -> None:
    """Puts this process into its cell, with these descriptors alone."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    kept = [2, *sorted(pipes), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]
    for before, after in itertools.pairwise(kept):
        os.closerange(before + 1, after)
    limits.become(cell.user)
    linux.die_with(keeper)
    limits.limit(order.seconds, order.megabytes)
    os.chdir(cell.folder)
    if cell.walls == "landlock":
        landlock.restrict(order.libraries, (cell.folder, *namespaces.DEVICES))
    if cell.filtered:
        system_calls.forbid()


def _fork(work: Callable[..., None], *arguments: Any) -> int:
    """Starts a process that does this work and ends."""
    child = os.fork()
    if child:
        return child
    try:
        work(*arguments)
        os._exit(0)
    finally:
        os._exit(_CRASHED)


def _read(descriptor: int, end: float) -> str:
    """The tests' verdict; "" if it does not come in time."""
    data = b""
    while len(data) <= _LONGEST_VERDICT:
        ready, _, _ = select.select([descriptor], [], [], max(end - time.monotonic(), 0))
        if not ready:
            return ""
        part = os.read(descriptor, _LONGEST_VERDICT)
        if not part:
            break
        data += part
    return data.decode(errors="replace") or "-stopped: the tests ended without a verdict"


def _report(walls: str, text: str) -> None:
    os.write(1, f"{walls}\n{text}".encode())
