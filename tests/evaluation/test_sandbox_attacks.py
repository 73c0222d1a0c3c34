"""Programs that attack the sandbox, in every setting that this machine allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import attacked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no walls")

NOBODY = 65534
SCRIPT = str(Path(attacked.__file__))
NAMES = [each.name for each in attacked.attacks()]
CHOSEN = (
    "writes garbage to the old place of the verdict and leaves",
    "writes brackets to every descriptor and leaves",
    "looks for the verdict in the frames of its callers",
    "returns an object that equals everything",
    "writes through the descriptors of other processes",
    "answers before it is asked",
    "ends an iteration of the tests",
    "reads a file",
    "writes to the kernel's log",
    "sends to a socket with a name from a pair",
    "kills a process",
    "forks by the table of 32 bits",
    "wants to outlive its parent",
    "makes folders that nobody may open",
    "sleeps for ever",
)

READING = {
    "reads a file",
    "reads a file by a path that goes up",
    "reads a file by a symbolic link",
    "lists a folder",
}
WRITING = {
    "makes a hard link to a file",
    "writes a new file",
    "changes a file",
    "cuts a file off",
    "removes a file",
    "renames a file",
    "makes a folder",
    "makes a pipe with a name",
}
ELSEWHERE = {
    "opens a device",
    "reads a file by the root of another process",
    "reads the environment of a process",
}


@pytest.mark.parametrize("refused", [[], ["namespaces"]], ids=["all", "no namespaces"])
def test_some_attacks(refused: list[str]) -> None:
    _attack(CHOSEN, refused=refused)


@pytest.mark.exhaustive
@pytest.mark.parametrize("user", [0, NOBODY], ids=["superuser", "user"])
@pytest.mark.parametrize("refused", [[], ["namespaces"]], ids=["all", "no namespaces"])
def test_every_attack(refused: list[str], user: int) -> None:
    _attack(NAMES, refused=refused, user=user)


# Without any walls a program reaches the files of its user and what /proc shows of the user's
# processes, but not the sandbox's processes. The superuser's programs are nobody's.
@pytest.mark.exhaustive
@pytest.mark.parametrize("user", [0, NOBODY], ids=["superuser", "user"])
def test_every_attack_without_walls(user: int) -> None:
    python = _python(NOBODY) if os.geteuid() == 0 else sys.executable
    names = [name for name in NAMES if "descriptors of other processes" not in name]
    found = _run(names, refused=["namespaces", "landlock"], user=user, unsafe=True, python=python)
    passed = {name for name, (passed, *_) in found["outcomes"].items() if passed}
    assert passed >= READING
    assert passed <= READING | ELSEWHERE | (set() if user == 0 else WRITING)
    mine = () if user == 0 else ("canary", "secret")
    assert not [each for each in found["harm"] if not any(name in each for name in mine)]


def test_nothing_runs_without_walls() -> None:
    found = _run(CHOSEN, refused=["namespaces", "landlock"])
    assert found["refusal"] == (
        "programs that a model wrote are not run here, because this system does not allow "
        "namespaces (Operation not permitted) and Landlock: use another system, or insist with "
        "unsafe=True (--unsafe)"
    )


def _attack(names: Sequence[str], **setting: Any) -> None:
    found = _run(names, **setting)
    if "refusal" in found:
        pytest.skip(found["refusal"])
    outcomes = found["outcomes"]
    assert set(outcomes) == set(names)
    assert [name for name, (passed, *_) in outcomes.items() if passed] == []
    assert found["harm"] == []
    assert found["grown"] < 32 << 10
    assert max(seconds for *_, seconds in outcomes.values()) < 10  # two, and the removal of files


def _run(
    names: Sequence[str],
    *,
    refused: list[str],
    user: int | None = None,
    unsafe: bool = False,
    python: str | None = None,
) -> dict[str, Any]:
    if user is None or (user == NOBODY and os.geteuid() != 0):
        user = os.geteuid()
    if user == 0 != os.geteuid():
        pytest.skip("this is not the superuser")
    setting = {"user": user, "refused": refused, "unsafe": unsafe, "names": list(names)}
    command = [python or _python(user), "-I", SCRIPT, json.dumps(setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _python(user: int) -> str:
    """An interpreter that this user can run, and that can read the script."""
    if user == os.geteuid():
        return sys.executable
    works = f"import sys; open({SCRIPT!r}); assert sys.version_info >= (3, 11)"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [python, "-I", "-c", works]
        try:
            done = subprocess.run(command, user=user, capture_output=True, check=False, cwd="/")
        except OSError:
            continue
        if done.returncode == 0:
            return python
    pytest.skip("no interpreter that another user can run")
