"""Every reader of files that others wrote, on damaged and hostile ones.

A reader raises ValueError or OSError with one printable sentence, or reads; it never hangs.
`make test` runs a few cases of each, `make test-all` as many as fit into a minute. For more of
them: SPECJAX_FUZZ_CASES=10000 python -m pytest tests/fuzz -m exhaustive
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints_tools.chat import renderer
from tests.fuzz import data_files, model_files
from tests.support.fuzzing import fuzz, fuzz_a_little

READERS = {each.__name__: each for each in (*model_files.READERS, *data_files.READERS)}
SECONDS = 60  # for the long run of all readers
FEW = {"own_checkpoint": 3, "sentencepiece_model": 2, "gguf": 5}  # cases that take longer


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates that take all of their time take less of it."""
    renderer.RENDERER.close()
    monkeypatch.setattr(renderer, "SECONDS", 0.2)
    yield
    renderer.RENDERER.close()


@pytest.mark.parametrize("name", READERS)
def test_a_few_cases(name: str, tmp_path: Path) -> None:
    read, cases = READERS[name](tmp_path)
    fuzz_a_little(read, cases, FEW.get(name, 15))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", READERS)
def test_many_cases(name: str, tmp_path: Path) -> None:
    read, cases = READERS[name](tmp_path)
    print(f"{name}: {fuzz(read, cases, SECONDS / len(READERS))} cases")
