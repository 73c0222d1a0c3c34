"""Results say by which command they were made, and rows of two commands never share a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.support import common
from benchmarks.support.results import Result


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a command; a clean tree."""
    words = ["script.py", "--batch", "8", "--json", "r.json", "--data=/home/me/data"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(common, "COMMIT", "abc1234")
    return words


def test_a_command_has_no_places(typed: list[str]) -> None:
    typed += ["--drafters", "two levels", "--peer", "/opt/peers/bin/python", "--sizes=1"]
    assert common.command() == (
        "python -m script --batch 8 --drafters 'two levels' --peer python --sizes 1"
    )


def test_rows_of_the_same_command_are_kept(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    assert common.kept_rows(result) == []
    common.write(result, [{"drafter": "Auto"}])
    assert common.kept_rows(result) == [{"drafter": "Auto"}]


def test_rows_of_another_command_are_refused(tmp_path: Path, typed: list[str]) -> None:
    result = tmp_path / "r.json"
    common.write(result, [{"drafter": "Auto"}])
    typed[2] = "4"
    with pytest.raises(SystemExit, match=r"holds rows of 'python -m script --batch 8'"):
        common.kept_rows(result)


def test_rows_of_another_commit_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "r.json"
    common.write(result, [{"drafter": "Auto"}])
    monkeypatch.setattr(common, "COMMIT", "def5678")
    assert common.kept_rows(result) == []


def test_a_page_shows_the_command() -> None:
    from benchmarks.support.pages import _made

    assert _made(Result("epyc/a", {"commit": "abc1234"}, [])) == "abc1234"
    assert _made(Result("epyc/a", {"commit": "abc1234"}, [], "python -m a")) == (
        "abc1234, `python -m a`"
    )
