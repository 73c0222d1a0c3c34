"""Fixtures of several test files: the place of real data, and small random models."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from specjax.bench.mappings import forget_programs
from specjax.model.params import Params
from tests.support.covering import covering
from tests.support.random_models import quantized_model
from tests.support.word_tokenizer import WordTokenizer

ROOT = Path(__file__).resolve().parent.parent
SECONDS_A_FILE = 30  # of `make test` on two quiet cores
# Files that take minutes come first, so that no process is left with one at the end.
LONGEST = (
    "tests/serving/",
    "tests/generation/test_sampling_drafters.py",
    "tests/commands/test_kills.py",
    "tests/kernels/test_gpu_layers.py",
    "tests/checkpoints/test_exact.py",
    "tests/generation/test_row_bits.py",
    "tests/generation/test_constraints.py",
    "tests/model/test_parallel.py",
    "tests/docs/test_examples.py",
    "tests/generation/test_trees.py",
    "tests/commands/test_cli.py",
    "tests/kernels/test_amx.py",
    "tests/kernels/test_matmul.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are shared among all tests and kept out of the user's cache.

    Python looks for garbage less often: tracing makes many objects, and few of them are garbage.
    """
    gc.set_threshold(50_000)
    if hasattr(config, "workerinput"):
        return  # a worker has the folder of the process that began it
    folder = tempfile.mkdtemp(prefix="specjax-tests-")
    os.environ["XDG_CACHE_HOME"] = folder
    config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `exhaustive` the cases that a test's `covering` mark leaves to `make test-all`, and
    puts the longest files first."""
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for group in groups.values():
        (strength,) = group[0].get_closest_marker("covering").args
        chosen = set(covering([values(item.callspec.params) for item in group], strength))
        for number, item in enumerate(group):
            if number not in chosen:
                item.add_marker(pytest.mark.exhaustive)
    items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in LONGEST])


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives every file to one process, and the files of tests/serving to one: the programs of
    their server are the same."""
    from xdist.scheduler import LoadFileScheduling

    class ByPrograms(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/serving" if file.startswith("tests/serving/") else file

    return ByPrograms(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints which files took longer than a file should; no test fails for its time."""
    seconds: Counter[str] = Counter()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    for file, total in seconds.most_common():
        if total > SECONDS_A_FILE:
            terminalreporter.write_line(f"{total:5.0f} s in {file}")


def values(parameters: Mapping[str, Any]) -> dict[str, Hashable]:
    """The same, but comparable: all but words and numbers by identity."""
    plain = str | int | float | None
    return {k: v if isinstance(v, plain) else id(v) for k, v in parameters.items()}


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs() -> Iterator[None]:
    """Every program that XLA has compiled stays mapped; the suite makes more of them than the 65530
    mappings that Linux allows a process, and the one that finds no room ends in a crash. A file
    finds those of the files before it, until they take a quarter of the mappings."""
    yield
    forget_programs()


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count compiled programs: what another process has kept is not found."""
    monkeypatch.setattr("specjax.files.kept_programs.place_of_programs", lambda: None)


@pytest.fixture
def wrong_types() -> Iterator[None]:
    """For tests that pass wrong types on purpose: the check of annotations would come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real prompts and models; tests that need it skip where it is absent."""
    path = Path(os.environ.get("SPECJAX_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no real data at {path}; set SPECJAX_DATA to its folder")
    return path


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Params:
    """Stands in for the model of every command."""
    params = quantized_model()
    tokenizer = WordTokenizer(params.config.vocab_size)
    monkeypatch.setattr("specjax.load", lambda source, **_: params)
    monkeypatch.setattr("specjax.load_tokenizer", lambda source: tokenizer)
    return params
