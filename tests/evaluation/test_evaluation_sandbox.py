"""The sandbox: what tests see of a program, what stops it, and what is left when the judge dies."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import select
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.evaluation import sandbox
from specjax.evaluation.box import (
    landlock,
    messages,
    namespaces,
    scratch,
    system_calls,
    tests_side,
)
from specjax.evaluation.sandbox import Outcome, Program, run
from tests.support import attacked

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parents there")


def judged(
    source: str, tests: str = "", names: tuple[str, ...] = ("f",), **options: Any
) -> Outcome:
    try:
        return run(Program(source, tests, names), **options)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "source", ["x = 1", "import math\nassert math.pi > 3", "open('here', 'w').write('a')", ""]
)
def test_programs_that_pass(source: str) -> None:
    outcome = judged(source)
    assert outcome.passed and outcome.reason == "" and outcome.walls in ("namespaces", "landlock")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("x = '\ud800'", "UnicodeEncodeError"),
        ("raise SystemExit(0)", "SystemExit: 0"),  # leaving early proves nothing
        ("exit()", "SystemExit"),
        ("import os; os._exit(0)", "exited by itself"),
        ("import os; os.abort()", "exited by itself"),
        ("input()", "EOFError"),
        ("x = bytearray(10**11)", "MemoryError"),
        ("open('big', 'wb').write(bytes(10**8))", "File too large"),
        ("import os; assert not os.environ.get('HOME')\nraise KeyError('clean')", "KeyError"),
        ("import time\ntime.sleep(1000)", "stopped: more than 1 s"),
    ],
)
def test_programs_that_fail(source: str, reason: str) -> None:
    outcome = judged(source, seconds=1)
    assert not outcome.passed and reason in outcome.reason


# The tests see values of every plain type, one function's effect on its argument, objects
# that stay where they are, the items of an iterator, and Python's exceptions.
@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("f = lambda *a: a",
         "x = None, True, -7, 1 << 20000, .1, 2j, 'ä\\ud800', b'\\0', [1, (2,)], {'a': {1}, 2: 3}, "
         "frozenset([3])\nassert f(*x) == x"),
        ("f = lambda a, key=0: a + key", "assert f(1, key=2) == 3"),
        ("import collections as c\nf = lambda: (c.Counter('aab'), c.namedtuple('P', 'x')(1))",
         "assert f() == ({'a': 2, 'b': 1}, (1,))"),
        ("f = lambda: float('nan')", "assert f() != f()"),
        ("def f(a, b, c):\n    a.sort()\n    b['x'] = 1\n    c.add(3)",
         "a, b, c = [2, 1], {}, {1}\nf(a, b, c)\nassert (a, b, c) == ([1, 2], {'x': 1}, {1, 3})"),
        ("class f:\n    def __init__(self, x): self.x = x\n"
         "    def twice(self): return 2 * self.x.x",
         "a = f(f(3))\nassert a.twice() == 6 and a.x.x == 3\na.x = f(4)\nassert a.twice() == 8\n"
         "assert a != a and a != f(3)"),
        ("f = lambda: (i * i for i in range(4))", "assert list(f()) == [0, 1, 4, 9]"),
        ("def f(): raise KeyError('gone')",
         "try:\n    f()\nexcept KeyError as error:\n    assert str(error) == \"'gone'\"\n"
         "else:\n    assert False"),
        ("def f(): b'\\xff'.decode()", "try: f()\nexcept UnicodeDecodeError: pass"),
    ],
)  # fmt: skip
def test_what_the_tests_see(source: str, tests: str) -> None:
    assert judged(source, tests) == Outcome(True, "", judged("").walls)


# The program has the names that tests take from it, and no other: neither Python's nor the given.
def test_the_tests_names_are_their_own() -> None:
    source = "def f(): return help_()\ndef help_(): return 0\nabs = f"
    given = "def help_(): return 7\ndef f(): return 2"
    program = Program(source, "assert help_() == 7 and abs(-2) == f()", ("f",), given)
    assert judged("").passed and run(program).reason == "AssertionError: "
    assert run(dataclasses.replace(program, source="def f(): return 2")).passed
    assert "NameError: name 'f' is not defined" in judged("g = 1", "f()").reason


def test_tests_do_not_catch_the_end_of_the_program() -> None:
    tests = "try:\n    f()\nexcept BaseException:\n    pass"
    assert not judged("import os\ndef f(): os._exit(0)", tests).passed
    assert judged("def f(): raise SystemExit", tests).passed


def test_a_program_sees_no_other_process() -> None:
    outcome = judged("import os\nf = os.getpid", "assert f() == 1")
    assert outcome.passed == (outcome.walls == "namespaces")


def test_what_is_printed_is_not_a_verdict() -> None:
    assert not judged("print('namespaces'); print('+', flush=True); assert False").passed


@pytest.mark.parametrize("report", [b"", b"\xff", b"namespaces", b"namespaces\n", b"\n\n+", b"+"])
def test_a_report_that_is_not_one_is_a_failure(report: bytes, monkeypatch: Any) -> None:
    monkeypatch.setattr(sandbox, "_report", lambda *_: report)
    assert not run(Program("")).passed
    with pytest.raises(OSError, match="the sandbox does not work on this system"):
        sandbox.check()


# The keeper is trusted; what it writes is bounded all the same.
@pytest.mark.parametrize(
    "keeper",
    ["while True: print('a' * 9999)", "print('[' * 3000)", "import os; os.abort()", "1 / 0"],
)
def test_a_keeper_that_fails(keeper: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(sandbox, "_START", keeper)
    outcome = run(Program(""))
    assert not outcome.passed and len(outcome.reason) < 10_000


def test_a_message_that_is_too_long() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\xff\xff\xff\x7f")
    with pytest.raises(ValueError, match="a message of 2147483647 bytes; at most 16777216"):
        messages.receive(reader)
    with pytest.raises(ValueError, match="a value takes 16777219 bytes; at most 16777216"):
        messages.send(writer, "a" * (1 + (1 << 24)))
    os.close(writer)
    with pytest.raises(EOFError):
        messages.receive(reader)
    os.close(reader)


# A message that the program's process makes up is read, or refused with one of these.
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
JSON = st.recursive(
    LEAVES | st.sampled_from([*"ifcbltszdo"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_values_that_are_made_up(packed: object) -> None:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        messages.unpack(packed, lambda ticket: ticket)


PLAIN = st.recursive(
    LEAVES | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_values_arrive_as_they_are(value: object) -> None:
    packed = json.loads(json.dumps(messages.pack(value, pytest.fail)))
    assert repr(messages.unpack(packed, pytest.fail)) == repr(value)  # NaN equals nothing


def _filtered(machine: int, number: int, *arguments: int) -> int:
    """Returns the filter's answer to a system call: 0 for yes, else the error."""
    seen = {0: number, 4: machine, **{16 + 8 * i: each for i, each in enumerate(arguments)}}
    instructions, place, value = system_calls._filter(4000), 0, 0
    while True:
        operation, if_true, if_false, operand = instructions[place]
        place += 1
        if operation == 0x06:
            return 0 if operand == 0x7FFF0000 else operand & 0xFFFF
        if operation == 0x20:
            value = seen.get(operand, 0)
        else:
            true = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}
            place += if_true if true[operation] else if_false


@pytest.mark.parametrize("column", [0, 1], ids=["x86_64", "aarch64"])
def test_the_filter(column: int, monkeypatch: Any) -> None:
    machine = ("x86_64", "aarch64")[column]
    monkeypatch.setattr(system_calls, "MACHINE", machine)
    its, other, i386 = system_calls._ARCHITECTURES[machine], 0xC00000F3, 0x40000003
    denied = {each[column] for each in system_calls._FORBIDDEN.values()} - {-1}
    assert all(_filtered(its, each) == errno.EPERM for each in denied)
    read, clone, kill, prctl, fcntl, pair = (
        (0, 56, 62, 157, 72, 53), (63, 220, 129, 167, 25, 199),
    )[column]  # fmt: skip
    assert _filtered(its, read) == 0 and _filtered(its, read + (1 << 30)) == errno.ENOSYS
    assert _filtered(other, read) == _filtered(i386, 2) == errno.EPERM
    assert _filtered(its, 435) == _filtered(its, 452) == errno.ENOSYS
    assert _filtered(its, clone, 17) == errno.EPERM and _filtered(its, clone, 0x3D0F00) == 0
    assert _filtered(its, kill, 4000, 9) == 0 and _filtered(its, kill, 4001, 9) == errno.EPERM
    assert _filtered(its, prctl, 1) == errno.EPERM and _filtered(its, prctl, 15) == 0
    assert _filtered(its, fcntl, 0, 8) == errno.EPERM and _filtered(its, fcntl, 0, 3) == 0
    assert _filtered(its, pair, 1, 2) == errno.EPERM and _filtered(its, pair, 1, 1 | 1 << 19) == 0


def test_there_are_no_walls_on_other_systems(monkeypatch: Any) -> None:
    for module in (namespaces, landlock, system_calls):
        monkeypatch.setattr(module, "MACHINE", "")
    assert not landlock.is_known() and not system_calls.is_known()
    with pytest.raises(OSError, match="not implemented"):
        namespaces.enter("/", [], 1)


# Each wall is tested alone, since the others would hide that one is missing.
SHOW = """
import json, os, socket, sys
from box import landlock, linux, namespaces
walls, base, library = sys.argv[1:]
if walls == "namespaces":
    namespaces.enter(base, [library], 8)
    namespaces.number_children_anew()
else:
    linux.drop_capabilities()
    landlock.restrict([library], [base])
reader, writer = os.pipe()
if os.fork() == 0:
    def works(action, *arguments):
        try:
            return action(*arguments) is not False
        except OSError:
            return False
    print(json.dumps({
        "first": os.getpid() == 1,
        "network": len(socket.if_nameindex()) > 1,
        "library": works(open, os.__file__),
        "library to write": works(open, os.__file__, "a"),
        "folder to write": works(open, "/tmp/new" if walls == "namespaces" else base + "/new", "w"),
        "the rest": works(os.listdir, "/etc"),
        "names of the rest": works(os.stat, "/etc/passwd"),
        "the rest to write": works(os.mkdir, "/new"),
    }), flush=True)
    os._exit(0)
os.wait()
"""


@LINUX
@pytest.mark.parametrize("walls", ["namespaces", "landlock"])
def test_each_wall_alone(walls: str, tmp_path: Path) -> None:
    place = f"import sys; sys.path.insert(0, {str(Path(sandbox.__file__).parent)!r})\n"
    library = str(Path(os.__file__).parent)
    command = [sys.executable, "-c", place + SHOW, walls, str(tmp_path), library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr or "not implemented" in done.stderr:
        pytest.skip(f"this system does not allow {walls}")
    apart = walls == "namespaces"
    assert json.loads(done.stdout) == {
        "first": apart, "network": not apart and len(socket.if_nameindex()) > 1, "library": True,
        "library to write": False, "folder to write": True, "the rest": False,
        "names of the rest": not apart, "the rest to write": False,
    }  # fmt: skip


# A killed evaluator leaves no process, and its folder to the next one to come; the folder of a
# living one stays.
@LINUX
@pytest.mark.parametrize("refused", [[], ["namespaces"]], ids=["all", "no namespaces"])
def test_a_killed_evaluator(refused: list[str], tmp_path: Path) -> None:
    source = "open('note', 'w')\nimport time\ntime.sleep(60)"
    evaluator = _evaluator(source, refused, tmp_path, seconds=60)
    _wait(lambda: len(attacked.living(tmp_path)) >= 4)
    evaluator.kill()
    evaluator.wait()
    _wait(lambda: not attacked.living(tmp_path))
    assert len(list(tmp_path.iterdir())) == bool(refused)
    slow = "open('note', 'w')\nimport time\ntime.sleep(1.5)\nassert open('note')"
    living = _evaluator(slow, refused, tmp_path, seconds=5)
    _wait(lambda: len(attacked.living(tmp_path)) >= 4)
    assert _evaluator("", refused, tmp_path, seconds=5).communicate()[0] == "True"
    assert living.communicate()[0] == "True"
    assert list(tmp_path.iterdir()) == []


# A program that began before its process was tied to the keeper could outlive a keeper that dies
# in between: it begins when its process has said that it is tied.
def test_a_program_waits_until_its_process_is_tied() -> None:
    requests, to_program = os.pipe()
    replies, to_tests = os.pipe()
    tests = json.dumps({"given": "", "names": [], "tests": ""}).encode()
    with ThreadPoolExecutor() as pool:
        verdict = pool.submit(tests_side.judge, tests, to_program, replies)
        assert messages.receive(requests) == ["ready"]
        assert select.select([requests], [], [], 0.1)[0] == []
        os.close(to_tests)
        assert "it exited by itself" in str(verdict.result())
    for each in (requests, to_program, replies):
        os.close(each)


@LINUX
@pytest.mark.exhaustive
@pytest.mark.parametrize("refused", [[], ["namespaces"]], ids=["all", "no namespaces"])
def test_evaluators_killed_at_any_moment(refused: list[str], tmp_path: Path) -> None:
    for number in range(30):
        source = "open('note', 'w')\nimport time\ntime.sleep(60)"
        evaluator = _evaluator(source, refused, tmp_path, seconds=60)
        time.sleep(0.05 + 0.005 * number)
        evaluator.kill()
        evaluator.wait()
        _wait(lambda: not attacked.living(tmp_path))
    assert _evaluator("", refused, tmp_path, seconds=5).communicate()[0] == "True"
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_deep_or_closed(tmp_path: Path) -> None:
    deep = tmp_path / "specjax-sandbox-deep"
    deep.mkdir()
    here = os.getcwd()
    os.chdir(deep)
    try:
        for _ in range(1100):  # more than descriptors or calls of a function may be open
            os.mkdir("d")
            os.chdir("d")
        Path("file").touch()
        os.symlink("/", "link")
    finally:
        os.chdir(here)
    (deep / "closed" / "inner").mkdir(parents=True)
    (deep / "closed").chmod(0)
    (tmp_path / "other").mkdir()
    scratch.sweep(str(tmp_path), [os.geteuid()])
    assert [each.name for each in tmp_path.iterdir()] == ["other"]


def _evaluator(
    source: str, refused: list[str], base: Path, *, seconds: int
) -> subprocess.Popen[str]:
    """A process that judges a program, and prints whether it passed."""
    code = (
        "import sys, tempfile; from attacked import load_sandbox, refuse\n"
        f"tempfile.tempdir = {str(base)!r}; refuse({refused}); sandbox = load_sandbox()\n"
        f"program = sandbox.Program({source!r})\n"
        f"sys.stdout.write(str(sandbox.run(program, seconds={seconds}, unsafe=True).passed))"
    )
    path = {"PYTHONPATH": str(Path(attacked.__file__).parent)}
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, env=path
    )


def _wait(until: Any) -> None:
    end = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end
        time.sleep(0.02)
