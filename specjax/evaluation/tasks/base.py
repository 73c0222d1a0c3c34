"""The interface of a task: entries are made from a local file, answered by a model, and judged.

`written` holds the tasks whose answers are decoded, `scored` those that read likelihoods.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from pallas_kernels.activations import Activation
from specjax.checks import shown
from specjax.evaluation.runs import Record
from specjax.files.json_lines import Line, read_lines
from specjax.generation.text import ChatTokenizer, TokenCodec
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter


class Setup(NamedTuple):
    """The model and how it is asked: the same for all tasks of a call.

    chat: the tokenizer whose template holds the questions; None: questions are plain texts.
    unsafe: programs that the model writes run also where nothing holds them.
    max_new_tokens: most tokens per answer; None: the task's own number.
    The other fields are those of `evaluate`.
    """

    params: Params
    tokenizer: TokenCodec
    drafter: Drafter
    rows: int = 8
    max_new_tokens: int | None = None
    activation: Activation = "a16"
    cache_bits: int = 16
    chat: ChatTokenizer | None = None
    unsafe: bool = False


class Identified(Protocol):
    """An item of a file, or what is made of one: it has an id that no other one of its task has."""

    @property
    def id(self) -> str: ...


# The text of a number of worked examples, read from the folder of data.
Examples = Callable[[Path, int], str]
Item = TypeVar("Item", bound=Identified)
Entry = TypeVar("Entry", bound=Identified)


class Task(abc.ABC, Generic[Entry]):
    """A set of items, each of which becomes an entry in the model's tokens and then a record.

    name: the task's name on the command line.
    title: the task in a few words.
    file: the file of items, within the folder of data.
    drafts: whether a drafter takes part.
    measured: the fields of a record without an error that `metrics` reads.
    """

    name: str
    title: str
    file: str
    drafts: bool = False

    @property
    @abc.abstractmethod
    def measured(self) -> tuple[str, ...]: ...

    @abc.abstractmethod
    def entries(self, setup: Setup, data: Path, shots: int | None) -> list[Entry]:
        """Reads the items and makes an entry of each.

        Args:
          setup: the model.
          data: the folder of data.
          shots: worked examples before each question; None: the task's own number. Tasks without
            examples ignore it.

        Raises:
          FileNotFoundError: the file is missing.
          ValueError: the file does not hold what it should, or has too few examples.
        """

    @abc.abstractmethod
    def records(self, setup: Setup, entries: Sequence[Entry]) -> Iterator[Record]:
        """Yields the record of every entry as soon as it is known; at least its `id`."""

    @abc.abstractmethod
    def metrics(self, records: Sequence[Record]) -> dict[str, float]:
        """The task's metrics over records without an error, at least one."""

    def check(self, setup: Setup) -> None:
        """Raises ValueError where this system cannot judge the task's answers as `setup` wants."""

    def kind(self, entry: Entry) -> str | None:
        """The kind of an entry that the file names, such as a subject; None where it names none."""
        return None

    def turns(self, entries: Sequence[Entry]) -> int:
        """The number of records that the entries lead to, later turns included."""
        return len(entries)

    def later(
        self, setup: Setup, entries: Sequence[Entry], records: Sequence[Record]
    ) -> list[Entry]:
        """The entries of the next turn, given the records of these."""
        return []

    def counts(self, records: Sequence[Record]) -> dict[str, float]:
        """The counts of drafting over all records; empty for a task without a drafter."""
        return {}


def identity(line: Line, name: str) -> str:
    """A line's own id, a number or a text; its number in the file where it has none."""
    own = line.fields.get(name, line.number)
    return str(own) if isinstance(own, int) else line.text(name, default=str(line.number))


def worked_examples(examples: Examples | None, own: int, shots: int | None, data: Path) -> str:
    """The text before every question: as many examples as asked for, or a task's own number.

    Raises ValueError for less than 0, and where there are too few examples.
    """
    count = own if shots is None else shots
    if count < 0:
        raise ValueError(f"shots must be at least 0, got {count}")
    return examples(data, count) if examples is not None and count else ""


def some_examples(path: Path, shots: int, read: Callable[[Line], str | None]) -> str:
    """The first worked examples of a file. Raises ValueError where it has too few."""
    found = [text for line in read_lines(path) if (text := read(line)) is not None]
    if shots > len(found):
        raise ValueError(f"{path} holds {len(found)} examples, shots={shots}")
    return "".join(found[:shots])


def mean(records: Sequence[Record], name: str) -> float:
    """The mean of a field of all records."""
    return float(np.mean([record[name] for record in records]))


def read_items(path: Path, read: Callable[[Line], Item | None]) -> list[Item]:
    """Reads the items of a file; lines that `read` makes None of are skipped.

    Raises ValueError if two items share an id, or the file has no items.
    """
    items: list[Item] = []
    seen: dict[str, int] = {}
    for line in read_lines(path):
        item = read(line)
        if item is None:
            continue
        if item.id in seen:
            raise ValueError(
                f"line {line.number} of {path} has the id {shown(item.id)} of line {seen[item.id]}"
            )
        seen[item.id] = line.number
        items.append(item)
    if not items:
        raise ValueError(f"{path} holds no items")
    return items
