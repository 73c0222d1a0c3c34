"""Runs the programs of attacks.txt in a setting and reports their outcomes and effects.

It is a script because a setting (the user, and the refused system calls) lasts as long as its
process. It imports the sandbox by its file, because that user may not read JAX. It prints JSON:
`outcomes`, each with passed, reason, walls and seconds; `harm`, a list of sentences; `grown`, the
growth of the evaluator's memory in kilobytes; or `refusal`, the reason why nothing ran.

    python attacked.py '{"user": 65534, "refused": ["namespaces"], "unsafe": false, "names": [...]}'
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve()
_TESTS = {"forge": "assert f() is True\nassert False", "reach": "assert f() is True"}
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_LANDLOCK = 444
_JOBS = 4
_SHARED = b"a secret"
_SLOW = 13  # a priority that no other code sets
_HARMLESS = """
import decimal, heapq, threading
with open("note", "w") as file:
    file.write("here")
def f(numbers):
    thread = threading.Thread(target=heapq.heapify, args=(numbers,))
    thread.start()
    thread.join()
    return open("note").read(), numbers[0]
"""


class Attack(NamedTuple):
    """A program, its aim, and the tests that it must not pass."""

    kind: str
    name: str
    source: str
    tests: str


def attacks() -> list[Attack]:
    """The programs of attacks.txt."""
    text = _HERE.with_name("attacks.txt").read_text()
    found = []
    for part in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        kind, _, name = title.partition(": ")
        source, _, tests = body.partition("-- tests\n")
        found.append(Attack(kind, name, source, tests or _TESTS[kind]))
    return found


def main() -> None:
    setting = json.loads(sys.argv[1])
    refuse(setting["refused"])
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        if setting["user"] != os.geteuid():
            os.chown(folder, setting["user"], setting["user"])
            os.setgroups([])
            os.setresgid(*[setting["user"]] * 3)
            os.setresuid(*[setting["user"]] * 3)
            ctypes.CDLL(None).prctl(
                4, ctypes.c_ulong(1), 0, 0, 0
            )  # readable, like a user's processes
        sandbox = load_sandbox()
        program = sandbox.Program(_HARMLESS, "assert f([3, 1, 2]) == ('here', 1)", ("f",))
        try:
            outcome = sandbox.run(program, unsafe=setting["unsafe"])
        except ValueError as error:
            print(json.dumps({"refusal": str(error)}))
            return
        assert outcome.passed, outcome
        print(json.dumps(_attacked(sandbox, Path(folder), setting)))


def _attacked(sandbox: Any, folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    base = folder / "base"
    base.mkdir()
    tempfile.tempdir = str(base)

    def attack(each: Attack) -> tuple[str, list[Any]]:
        source = _filled(each.source, places)
        begun = time.monotonic()
        program = sandbox.Program(source, each.tests, ("f",))
        outcome = sandbox.run(program, seconds=1, unsafe=setting["unsafe"])
        seconds = time.monotonic() - begun
        return each.name, [outcome.passed, outcome.reason, outcome.walls, seconds]

    with _surroundings(folder) as (places, harm), ThreadPoolExecutor(_JOBS) as pool:
        chosen = [each for each in attacks() if each.name in setting["names"]]
        attack(chosen[0])  # creates the threads and selectors
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcomes = dict(pool.map(attack, chosen))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        left = [f"{each} is left" for each in (*base.iterdir(), *living(base))]
        return {"outcomes": outcomes, "harm": [*harm(), *left], "grown": grown}


@contextlib.contextmanager
def _surroundings(folder: Path) -> Iterator[Any]:
    """Targets that a program may try to reach, and a function that reports the reached ones."""
    secret, canary, name = folder / "secret", folder / "canary", str(folder / "socket")
    secret.write_text("a secret")
    canary.mkdir()
    before = _state(secret)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(*kind)) for kind in (
            (socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM),
            (socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_DGRAM),
            (socket.AF_UNIX, socket.SOCK_STREAM),
        )]  # fmt: skip
        sockets[0].bind(("127.0.0.1", 0))
        addresses = (sockets[0].getsockname(), name, f"{name}.datagrams", f"\0{name}")
        for each, address in zip(sockets[1:], addresses, strict=True):
            each.bind(address)
        for each in sockets:
            each.setblocking(False)
            if each.type == socket.SOCK_STREAM:
                each.listen()
        segment, shared = stack.enter_context(_segment())
        victim = stack.enter_context(
            subprocess.Popen([sys.executable, "-I", "-c", "input()"], stdin=subprocess.PIPE)
        )
        stack.callback(victim.kill)
        places = {
            "SECRET": str(secret), "CANARY": str(canary), "SOCKET": name, "VICTIM": victim.pid,
            "EVALUATOR": os.getpid(), "PORT": addresses[0][1], "SEGMENT": segment, "SLOW": _SLOW,
        }  # fmt: skip

        def harm() -> list[str]:
            found = [f"{each} was reached" for each in sockets if _reached(each)]
            found += [f"{each} is new" for each in canary.iterdir()]
            if _state(secret) != before:
                found.append("the secret was changed")
            if shared() != _SHARED:
                found.append("the shared memory was changed")
            if victim.poll() is not None or os.getpriority(os.PRIO_PROCESS, victim.pid) == _SLOW:
                found.append("the victim was reached")
            return found

        yield places, harm


@contextlib.contextmanager
def _segment() -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Shared memory of System V: its number, and a function that reads it."""
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, len(_SHARED), 0o1600)
    place = libc.shmat(segment, None, 0)
    ctypes.memmove(place, _SHARED, len(_SHARED))
    try:
        yield segment, lambda: ctypes.string_at(place, len(_SHARED))
    finally:
        libc.shmctl(segment, 0, None)


def _state(path: Path) -> tuple[Any, ...] | None:
    try:
        found = path.stat()
        return path.read_text(), found.st_mode, found.st_uid, found.st_mtime_ns, found.st_ctime_ns
    except OSError:
        return None


def _reached(listening: socket.socket) -> bool:
    try:
        listening.recv(1) if listening.type == socket.SOCK_DGRAM else listening.accept()
    except BlockingIOError:
        return False
    return True


def living(base: Path) -> list[int]:
    """The sandbox's processes: others with this folder in their arguments."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(base).encode() in each.read_bytes() and int(each.parent.name) != os.getpid():
                found.append(int(each.parent.name))
    return found


def _filled(source: str, places: dict[str, Any]) -> str:
    return re.sub(
        r"\b[A-Z]{4,}\b", lambda m: repr(places[m[0]]) if m[0] in places else m[0], source
    )


def load_sandbox() -> Any:
    """Imports the sandbox's module without its package."""
    path = _HERE.parents[2] / "specjax" / "evaluation" / "sandbox.py"
    spec = importlib.util.spec_from_file_location("sandbox", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["sandbox"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refuse(what: list[str]) -> None:
    """Makes system calls for namespaces or Landlock fail in this process."""
    numbers = {"namespaces": _UNSHARE[os.uname().machine], "landlock": _LANDLOCK}
    filter_ = [(0x20, 0, 0, 0)]
    for each in what:
        filter_ += [(0x15, 0, 1, numbers[each]), (0x06, 0, 0, 0x00050001)]
    filter_ += [(0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filter_))
    program = ctypes.create_string_buffer(struct.pack("HP", len(filter_), ctypes.addressof(code)))
    libc, zero = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
    libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero)
    assert libc.prctl(22, ctypes.c_ulong(2), program, zero, zero) == 0


if __name__ == "__main__":
    main()
