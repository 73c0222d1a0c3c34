"""The sandbox: what tests see of a program, what stops it, and what is left when the judge dies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.evaluation import sandbox
from specjax.evaluation.box import messages, scratch
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


# What the tests see: values of every plain type, one function's effect on its argument, objects
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


def test_what_is_printed_is_not_a_verdict() -> None:
    assert not judged("print('namespaces'); print('+', flush=True); assert False").passed


@pytest.mark.parametrize("report", [b"", b"\xff", b"namespaces", b"namespaces\n", b"\n\n+", b"+"])
def test_a_report_that_is_not_one_is_a_failure(report: bytes, monkeypatch: Any) -> None:
    monkeypatch.setattr(sandbox, "_report", lambda *_: report)
    assert not run(Program("")).passed
    with pytest.raises(OSError, match="the sandbox does not work on this system"):
        sandbox.check()


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
