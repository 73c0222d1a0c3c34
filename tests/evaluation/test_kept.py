"""A run that is told to end, or whose disk is full, keeps its work and says so."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from specjax.evaluation import corpus, runs
from specjax.files import interruption

SETTINGS = {"tasks": ["piqa"]}


def told_to_end() -> list[str]:
    """Returns the line that the process would print if it were told to end here."""
    return [sentence for undo in interruption._unfinished.values() if (sentence := undo())]


def test_results_are_kept_and_their_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with runs.Results(file, SETTINGS) as results:
        results.add({"task": "piqa", "id": "1"})
        (sentence,) = told_to_end()
    assert sentence.startswith(f"1 results are kept in {file}, and the same command goes on")
    assert not told_to_end()
    with runs.Results(file, SETTINGS) as results:
        assert len(results.records) == 1


# The first run replaces its file when it ends; a second one has opened the old file by then.
def test_a_file_that_was_replaced_before_it_is_locked(tmp_path: Path, monkeypatch) -> None:
    file, flock = tmp_path / "results.jsonl", fcntl.flock
    first = runs.Results(file, SETTINGS)
    first.add({"task": "piqa", "id": "1"})

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.finish(first.records)
        first.close()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with runs.Results(file, SETTINGS) as second:
        assert [*second.records] == [("piqa", "1")]
        second.add({"task": "piqa", "id": "2"})
    assert len(runs.read_results(file, runs.EVALUATED)[1]) == 2


def test_a_run_without_results_leaves_no_file(tmp_path: Path) -> None:
    with runs.Results(tmp_path / "results.jsonl", SETTINGS):
        assert told_to_end() == []
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_results_so_far(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "results.jsonl"
    with runs.Results(file, SETTINGS) as results:
        results.add({"task": "piqa", "id": "1"})

        def write(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", write)
        with pytest.raises(OSError, match=r"disk is full: .* holds the results so far") as full:
            results.add({"task": "piqa", "id": "2"})
    assert full.value.errno == errno.ENOSPC and file.read_bytes().count(b"\n") == 2


def test_scores_are_kept_and_their_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / ".out.scores"
    np.array([np.nan, 1.5, np.nan], np.float32).tofile(file)
    sentence = corpus._kept(file)
    assert sentence == f"1 scores are kept in {file}, and the same command goes on from there"
    np.array([np.nan] * 3, np.float32).tofile(file)
    assert corpus._kept(file) is None and not file.exists()
    assert corpus._kept(file) is None
