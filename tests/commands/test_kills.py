"""Commands that write, killed while they write and interrupted at any time: nothing is lost.

A killed command leaves what was there before, or all that is new. The same command, started again,
ends with what it would have written at once, measured times aside, and leaves nothing else.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from checkpoints_tools.sources import SHIPPED_PATH
from tests.checkpoints.test_train_tiny import write_corpus
from tests.support.ended_commands import SPECJAX, Command, Ended
from tests.support.hf_directories import write_model
from tests.support.task_files import write_tasks

# Kills, and interruptions, of each command.
TIMES = int(os.environ.get("SPECJAX_KILLS", "1"))
PYTHON = 0.5  # seconds until the interpreter has started
TRAIN = """
import sys
from specjax.files import interruption

interruption.listen("specjax")
from checkpoints_tools import tiny_corpus, train_tiny
from tests.checkpoints.test_train_tiny import MICRO

train_tiny.PRESETS["tiny"] = MICRO
tiny_corpus.PYTHON_CHARACTERS = 30_000
interruption.end(train_tiny.main(sys.argv[1:]))
"""
SHARED = "--data {inputs} --limit 3 --rows 1 --max-new-tokens 24 --shots 1"
COMMANDS = {
    "convert": "convert {inputs}/model out",
    "quantize": "quantize {inputs}/model out --quantize gptq --sequences 2 --length 32 "
    "--calibration {inputs}/corpus.txt",
    "export": "export tiny out",
    "generate": "generate once --max-new-tokens 8 --memory out",
    "datastore": "datastore build {inputs}/corpus.txt out --keep 40 --length 16 --rows 2",
    "evaluate": f"evaluate mbpp piqa --out out {SHARED}",
    "table": f"evaluate table piqa --models A=tiny --out out {SHARED}",
    "bench": "bench --drafters prompt-lookup:draft_length=2 --limit 1 --turns 1 --max-new-tokens 4 "
    "--prompts {inputs}/corpus.txt again={inputs}/corpus.txt --out out",
    "perplexity": "evaluate perplexity {inputs}/corpus.txt --max-tokens 600 --window 64 --json out",
    "memory": "plan memory --json out",
    "layers": "plan layers {inputs}/corpus.txt --sequences 1 --length 32 --json out",
    "train": "--data {inputs} --out run --steps 20 --rows 2 --save-every 5",
}
LINES = ("evaluate", "table", "bench")  # their outputs grow line by line
GROWING = ("train", *LINES)  # what they leave may be less than the whole
ADDING = ("export", "generate")  # they replace nothing, or add to what is there
# An interruption ends every command in the same way. More kills than usual interrupt all of them.
INTERRUPTED = COMMANDS if TIMES > 1 else ("convert", "generate", "evaluate", "bench", "train")


def cases(names: Iterable[str]) -> list[Any]:
    some = [pytest.param(name, TIMES, marks=pytest.mark.exhaustive) for name in names]
    return [pytest.param("convert", 1), *some]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_corpus(folder)
    write_tasks(folder)
    model = write_model(folder / "model", num_hidden_layers=4, vocab_size=4096)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((SHIPPED_PATH / "tiny" / file).read_bytes())
    words = ["once", "upon", "a", "time", "there", "was", "king", "queen", "and", "or"]
    rng = random.Random(0)
    texts = (" ".join(rng.choices(words, k=15)) for _ in range(90))
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    return folder


class Whole(NamedTuple):
    """A run that nothing disturbs: the seconds until it writes and until its end, its output."""

    writes: float
    ends: float
    content: str | None


@pytest.fixture(scope="module")
def runs() -> dict[str, Whole]:
    return {}


@pytest.fixture
def command(inputs: Path, tmp_path: Path, name: str) -> Command:
    arguments = COMMANDS[name].format(inputs=inputs).split()
    if name == "train":
        return Command(tmp_path, (sys.executable, "-c", TRAIN, *arguments), "run/hf")
    return Command(tmp_path, (*SPECJAX, *arguments), "out")


@pytest.fixture
def whole(command: Command, name: str, runs: dict[str, Whole]) -> Whole:
    if name not in runs:
        runs[name] = Whole(*command.run(), command.content())
        command.clear()
    return runs[name]


@pytest.mark.parametrize(("name", "times"), cases(COMMANDS))
def test_killed_while_it_writes(command: Command, whole: Whole, name: str, times: int) -> None:
    records = 0
    for ended in kills(command, name, signal.SIGKILL, 0, whole.ends - whole.writes, times):
        assert ended.status in (-signal.SIGKILL, 0), ended.errors
        if name in LINES:
            before, records = records, count_records(command.target)
            assert records >= before
        assert name in GROWING or command.content() in (None, whole.content)
        if (ended.status == 0 and name != "convert") or name in ADDING:
            command.clear()
            records = 0
    ends_well(command, whole)


@pytest.mark.parametrize(("name", "times"), cases(INTERRUPTED))
def test_interrupted_at_any_time(command: Command, whole: Whole, name: str, times: int) -> None:
    kept: set[Path] = set()
    for ended in kills(command, name, signal.SIGINT, PYTHON, whole.ends, times):
        assert "Traceback" not in ended.errors and "Error" not in ended.errors
        if ended.status == 0:
            assert command.content() == whole.content and not command.hidden()
        else:
            assert ended.status == 130, ended.errors
            assert re.search(r"specjax: interrupted[^\n\r]*\n$", ended.errors)
            assert all(str(path) in ended.errors for path in set(command.hidden()) - kept)
            assert name in GROWING or command.content() in (None, whole.content)
        if ended.status == 0 or name in ADDING:
            command.clear()
        kept = set(command.hidden())
    ends_well(command, whole)


def kills(
    command: Command, name: str, number: int, begin: float, end: float, times: int
) -> Iterator[Ended]:
    """Sends a signal at random moments until it has hit so often; some come too late."""
    moments, hits = random.Random(name), 0
    for _ in range(4 * times):
        delay = moments.uniform(begin, end)
        ended = command.kill(number, delay, writing=number == signal.SIGKILL)
        yield ended
        if ended.status == 0:
            end = min(end, ended.lasted)  # programs that are compiled once make later runs faster
        else:
            hits += 1
        if hits == times:
            break
    # A file may be written whole before a kill that waits for its first byte.
    assert hits or number == signal.SIGKILL, "every signal came too late"


def ends_well(command: Command, whole: Whole) -> None:
    """The same command ends with what it would have written at once, and leaves nothing else."""
    command.run()
    assert command.content() == whole.content
    assert not command.hidden()


def count_records(target: Path) -> int:
    """The records in a file or a folder of files, of which the last may be torn.

    A kill between the making of a file and its renaming leaves a hidden folder, without records.
    """
    files = target.glob("[!.]*") if target.is_dir() else [target] if target.exists() else []
    lines = [line for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    return len([json.loads(line) for line in lines])
