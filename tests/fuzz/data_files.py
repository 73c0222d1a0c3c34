"""Readers of prompts, tasks, results and datastores, and damaged and hostile files for them."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from specjax.bench.cells import MEASURED, Cell, read_cells
from specjax.bench.table import format_cells
from specjax.commands.prompts import read_prompts
from specjax.drafting.datastore import Datastore
from specjax.drafting.suffix_memory import SuffixMemory
from specjax.evaluation.runs import Results
from specjax.evaluation.tasks import TASKS
from specjax.evaluation.tasks.base import Setup
from tests.support import small_tokenizers
from tests.support.fuzzing import Reader, reads
from tests.support.mutations import changed_bytes, changed_json
from tests.support.random_models import quantized_model
from tests.support.task_files import write_tasks


def results(folder: Path) -> Reader:
    settings = {"model": "m", "limit": None}
    file = folder / "results.jsonl"
    with Results(file, settings) as found:
        counts = dict.fromkeys(("rounds", "drafted", "tested", "accepted", "generated"), 3)
        found.add({"task": "gsm8k", "id": "1", "correct": True, "note": "", "text": "a",
                   "tokens": [1, 2], **counts})  # fmt: skip
        found.add({"task": "piqa", "id": "2", "correct": False, "correct per character": True,
                   "log_likelihoods": [-1.0, -2.5]})  # fmt: skip
        found.add({"task": "wikitext2", "id": "0", "nats": 31.5, "scored": 7})
        found.add({"task": "gsm8k", "id": "3", "error": "too long"})
    data = file.read_bytes()
    lines = [json.loads(line) for line in data.splitlines()]

    def read() -> None:
        with Results(file, settings) as found:
            for name, item in found.records:
                if name in TASKS:
                    record = found.get(name, item, TASKS[name].measured)
                    TASKS[name].counts([record])
                    if "error" not in record:
                        TASKS[name].metrics([record])

    changed = changed_json(lines).map(_as_lines)
    return reads(file, read), st.one_of(changed, changed_bytes(data))


def benchmark(folder: Path) -> Reader:
    cell = Cell(
        model="m", texts="one", rows=1, drafter="qspec", draft_length=2, prompts=2, identical=2,
        ratios=(1.5, 0.5), seconds=2.0, rounds=10, drafted=20, tested=16, accepted=10,
        generated=20, tested_at=(10, 6), kept_at=(6, 4), draft_seconds=0.5, verify_seconds=1.5,
        target_bytes=100, draft_bytes=10, state_bytes=5,
    )  # fmt: skip
    other = dataclasses.replace(cell, texts="two")
    file = folder / "cells.jsonl"
    with Results(file, {"max_new_tokens": 64, "processor": "P"}, MEASURED) as found:
        for each in (cell, other):
            found.add(each.record())
    data = file.read_bytes()
    lines = [json.loads(line) for line in data.splitlines()]

    def read() -> None:
        assert format_cells([read_cells(file)]).replace("\n", "").isprintable()

    changed = changed_json(lines).map(_as_lines)
    return reads(file, read), st.one_of(changed, changed_bytes(data))


def _as_lines(data: bytes) -> bytes:
    """The elements of a JSON list, one a line; what is not such a list as it is."""
    try:
        lines = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return b"".join(json.dumps(x).encode() + b"\n" for x in lines) if type(lines) is list else data


def datastore(folder: Path) -> Reader:
    place = folder / "store"
    Datastore.create([np.array([1, 2, 3]), np.array([2, 1])], 4).save(place)
    files = {file.name: file.read_bytes() for file in place.iterdir()}
    manifest = changed_json(json.loads(files["datastore.json"]))
    cases = [st.tuples(st.just("datastore.json"), manifest)]
    cases += [st.tuples(st.just(name), changed_bytes(data)) for name, data in files.items()]

    def read(case: tuple[str, bytes]) -> None:
        for name, data in (files | dict([case])).items():
            (place / name).write_bytes(data)
        Datastore.load(place)

    return read, st.one_of(*cases)


def suffix_memory(folder: Path) -> Reader:
    place = folder / "memory"
    SuffixMemory.create(4, capacity=5).add([[1, 2, 3], [2, 1]]).save(place)
    files = {file.name: file.read_bytes() for file in place.iterdir()}
    manifest = changed_json(json.loads(files["suffix_memory.json"]))
    cases = [st.tuples(st.just("suffix_memory.json"), manifest)]
    cases += [st.tuples(st.just(name), changed_bytes(data)) for name, data in files.items()]

    def read(case: tuple[str, bytes]) -> None:
        for name, data in (files | dict([case])).items():
            (place / name).write_bytes(data)
        SuffixMemory.load(place)

    return read, st.one_of(*cases)


def prompts(folder: Path) -> Reader:
    lines = b'{"prompt": "a"}\n\n{"text": "b", "question": 1}\n'

    def read(case: tuple[str, bytes]) -> None:
        file = folder / case[0]
        file.write_bytes(case[1])
        read_prompts(file)

    objects = [
        {"prompt": "a"}, {"text": "b", "question": 1}, {"turns": ["a", "b"]},
        {"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]},
        {"conversation": [{"role": "user", "content": "a"}]},
    ]  # fmt: skip
    json_lines = changed_json(objects).map(_as_lines)
    plain = st.one_of(json_lines, changed_bytes(lines))
    packed = st.one_of(plain.map(gzip.compress), changed_bytes(gzip.compress(lines)))
    return read, st.one_of(
        st.tuples(st.sampled_from(("a.jsonl", "a.txt")), plain),
        st.tuples(st.just("a.json"), changed_json(objects)),
        st.tuples(st.sampled_from(("a.jsonl.gz", "a.gz")), packed),
    )


def task_files(folder: Path) -> Reader:
    write_tasks(folder)
    setup = Setup(quantized_model(), small_tokenizers.TINY, None)  # type: ignore[arg-type]
    tasks = {name: task for name, task in TASKS.items() if (folder / task.file).is_file()}
    files = {name: (folder / task.file).read_bytes() for name, task in tasks.items()}
    valid = {
        name: [json.loads(line) for line in data.splitlines()]
        for name, data in files.items()
        if tasks[name].file.endswith(".jsonl")
    }

    def read(case: tuple[str, bytes]) -> None:
        name, data = case
        file = folder / tasks[name].file
        file.write_bytes(data)
        try:
            tasks[name].entries(setup, folder, None)
        finally:
            file.write_bytes(files[name])

    changed = [
        st.tuples(st.just(name), changed_json(lines).map(_as_lines))
        for name, lines in valid.items()
    ]
    return read, st.one_of(*changed)


READERS = (
    results,
    benchmark,
    datastore,
    suffix_memory,
    prompts,
    task_files,
)
