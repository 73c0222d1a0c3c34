"""Results that outlive the process: a killed run continues from its file.

The first line holds the settings that decide the results. Every other line holds the record of an
item, and is synchronized to disk as soon as it is known. A killed run leaves whole lines and at
most one torn line, which the next run drops. A run that ends puts the lines into the order of the
items in one step: the file is then byte for byte that of a run that was never killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from specjax.checks import Check, Whole, check_flag, check_text, printable, shown
from specjax.files import interruption
from specjax.files.disk_space import room_for
from specjax.files.json_objects import parse
from specjax.files.locks import try_lock
from specjax.files.outputs import replacing_file

Record = dict[str, Any]


class Kind(NamedTuple):
    """A kind of results.

    command: what makes them, for messages.
    head: the field that marks a first line.
    fields: fields of a record, and what they accept.
    """

    command: str
    head: str
    fields: Mapping[str, Check]


def _check_number(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a number of any size that fits into 64 bits."""
    if not isinstance(value, float):
        Whole(-(2**62), 2**62)(name, value)


def _check_numbers(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a list of numbers."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {shown(value)}")
    for each in value:
        _check_number(name, each)


def _check_verdict(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a verdict, None for an answer that nobody judges."""
    if value is not None:
        check_flag(name, value)


_COUNT = Whole(0, 2**62)
_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("task", "id", "text", "error", "note"), check_text),
    **dict.fromkeys(("rounds", "drafted", "tested", "accepted", "generated"), _COUNT),
    "scored": Whole(1, 2**62),
    **dict.fromkeys(("nats", "rouge1", "rouge2", "rougeL"), _check_number),
    **dict.fromkeys(("log_likelihoods", "tokens"), _check_numbers),
    **dict.fromkeys(("correct", "correct per character"), _check_verdict),
}


EVALUATED = Kind("specjax evaluate", "specjax_results", _FIELDS)


class Results:
    """The records of a run, in memory and, with a path, in a file.

    records: the records by task and id.

    Args:
      path: the file; None: memory alone.
      settings: the settings that decide the results, as JSON can hold them.
      kind: what is kept.

    Raises:
      ValueError: another process writes to the file, the file does not hold results, or they have
        other settings.
    """

    def __init__(self, path: Path | None, settings: Record, kind: Kind = EVALUATED) -> None:
        self.records: dict[tuple[str, str], Record] = {}
        self._path = path
        self._kind = kind
        self._head = {kind.head: 1, **settings}
        self._descriptor: int | None = None
        self._stack = ExitStack()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _locked(path)
            try:
                self._take_up(path)
            except BaseException:
                self.close()
                raise

    def add(self, record: Record) -> None:
        """Keeps the record of an item; it holds a `task` and an `id`."""
        self.records[record["task"], record["id"]] = record
        self._write(record)

    def get(self, task: str, item: str, measured: Iterable[str]) -> Record:
        """The record of an item. Raises ValueError if it has neither an error nor all fields of
        `measured`."""
        record = self.records[task, item]
        for name in measured if record.get("error") is None else ():
            if record.get(name) is None:
                raise ValueError(
                    f"{self._path} has no {name} in the result of {printable(item)}: "
                    "give another file"
                )
        return record

    def finish(self, order: Iterable[tuple[str, str]]) -> None:
        """Rewrites the file with the records of a finished run in this order."""
        if self._path is None:
            return
        with replacing_file(self._path) as temporary, temporary.open("wb") as file:
            file.write(_line(self._head))
            file.writelines(_line(self.records[key]) for key in order)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Lets another process write to the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Results:
        self._stack.callback(self.close)
        self._stack.enter_context(interruption.unfinished(self._kept))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _kept(self) -> str | None:
        """Says what a run that is told to end leaves behind: nothing before the first result."""
        if self._path is None:
            return None
        if not self.records:
            self._path.unlink(missing_ok=True)
            return None
        count = len(self.records)
        return f"{count} results are kept in {self._path}, and the same command goes on from there"

    def _take_up(self, path: Path) -> None:
        """Reads the records of an earlier run, and cuts off a torn last line."""
        data = path.read_bytes()
        whole = _whole_lines(data)
        if not whole and not _line(self._head).startswith(data):
            raise _not_results(path, self._kind)
        for number, record in _records(path, whole, self._kind):
            if number == 1:
                self._check_head(path, record)
            else:
                self.records[record["task"], record["id"]] = record
        os.truncate(path, len(whole))
        if not whole:
            self._write(self._head)

    def _check_head(self, path: Path, head: Record) -> None:
        other = [name for name in {**self._head, **head} if head.get(name) != self._head.get(name)]
        if other:
            name = other[0]
            raise ValueError(
                f"{path} holds results of another run, with {printable(name)} "
                f"{printable(json.dumps(head.get(name)))}; this one has "
                f"{printable(json.dumps(self._head.get(name)))}: give another file, or remove it"
            )

    def _write(self, record: Record) -> None:
        if self._descriptor is None:
            return
        assert self._path is not None
        line = _line(record)
        with room_for(self._path, left="holds the results so far"):
            while line:  # a write may take a part only
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)


def _locked(path: Path) -> int:
    descriptor = try_lock(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    if descriptor is None:
        raise ValueError(f"another process writes to {path}: give another file")
    return descriptor


def read_results(path: Path, kind: Kind) -> tuple[Record, list[Record]]:
    """The settings and the records in a file, whose run may not have ended.

    Raises ValueError if the file holds anything else.
    """
    whole = _whole_lines(path.read_bytes())
    if not whole:
        raise _not_results(path, kind)
    (_, settings), *found = _records(path, whole, kind)
    records = {(record["task"], record["id"]): record for _, record in found}  # the last counts
    return settings, list(records.values())


def _whole_lines(data: bytes) -> bytes:
    """A file's contents without a torn last line."""
    return data[: data.rfind(b"\n") + 1]


def _records(path: Path, lines: bytes, kind: Kind) -> Iterator[tuple[int, Record]]:
    """The first line and the records, with the numbers of their lines."""
    for number, line in enumerate(lines.splitlines(), start=1):
        yield number, _parsed(path, number, line, kind)


def _parsed(path: Path, number: int, line: bytes, kind: Kind) -> Record:
    """The first line, or the record of an item."""
    place = f"line {number} of {path}"
    try:
        record = parse(line, place)
    except ValueError:
        record = None
    needed = (kind.head,) if number == 1 else ("task", "id")
    if not isinstance(record, dict) or not all(name in record for name in needed):
        raise _not_results(place, kind)
    for name in {*kind.fields} & {*record} if number > 1 else ():
        kind.fields[name](f"{name} in {place}", record[name])
    return record


def _not_results(place: object, kind: Kind) -> ValueError:
    return ValueError(f"{place} does not hold results of {kind.command}: give another file")


def _line(record: Record) -> bytes:
    return json.dumps(record).encode() + b"\n"
