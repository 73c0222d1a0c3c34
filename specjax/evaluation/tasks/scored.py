"""Tasks whose texts are given: the model says how likely each is, and no drafter takes part."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.evaluation.likelihood import log_likelihoods
from specjax.evaluation.runs import Record
from specjax.evaluation.sliding_windows import Perplexity
from specjax.evaluation.tasks.base import (
    Examples,
    Setup,
    Task,
    mean,
    read_items,
    worked_examples,
)
from specjax.files.json_lines import Line, read_text
from specjax.generation.text import TokenCodec

_AHEAD = 4  # batches of likelihoods between two records on disk


@dataclasses.dataclass(frozen=True)
class Choice:
    """Options, each a context and its continuation; number `gold` is the right one."""

    id: str
    options: tuple[tuple[str, str], ...]
    gold: int


class Pairs(NamedTuple):
    """Contexts and continuations in the model's tokens; `choice` is None for a part of a text."""

    id: str
    pairs: list[tuple[list[int], list[int]]]
    choice: Choice | None = None


class ScoredTask(Task[Pairs]):
    """A task whose records are made of likelihoods."""

    @abc.abstractmethod
    def record(self, entry: Pairs, found: list[float]) -> Record:
        """The record of an entry, given the log-likelihood of each of its continuations."""

    def records(self, setup: Setup, entries: Sequence[Pairs]) -> Iterator[Record]:
        longest = setup.params.config.max_position_embeddings
        fitting = []
        for entry in entries:
            length = max(len(end) for _, end in entry.pairs)
            if length < longest:
                fitting.append(entry)
            else:
                error = f"a continuation of {length} tokens; the model has {longest} positions"
                yield {"id": entry.id, "error": error}
        for first in range(0, len(fitting), _AHEAD * setup.rows):
            some = fitting[first : first + _AHEAD * setup.rows]
            scores = log_likelihoods(
                setup.params, [pair for entry in some for pair in entry.pairs], rows=setup.rows,
                activation=setup.activation, cache_bits=setup.cache_bits,
            )  # fmt: skip
            found = iter(scores)
            for entry in some:
                yield self.record(entry, [next(found)[0] for _ in entry.pairs])


@dataclasses.dataclass(frozen=True)
class ChoiceTask(ScoredTask):
    """A task whose answer is the option with the most likely continuation.

    name: the task's name on the command line.
    title: the task in a few words.
    file: the file of items, within the folder of data.
    read: makes a choice of a line.
    examples: makes the text of worked examples before every context; there are none unless asked.
    """

    name: str
    title: str
    file: str
    read: Callable[[Line], Choice]
    examples: Examples | None = None

    def items(self, data: Path, shots: int | None = None) -> list[Choice]:
        """The choices, each context after `shots` worked examples.

        Raises ValueError where a file does not hold what it should, or has too few examples.
        """
        examples = worked_examples(self.examples, 0, shots, data)
        return [
            dataclasses.replace(
                item, options=tuple((examples + start, end) for start, end in item.options)
            )
            for item in read_items(data / self.file, self.read)
        ]

    def entries(self, setup: Setup, data: Path, shots: int | None) -> list[Pairs]:
        return [
            Pairs(item.id, [_split(setup.tokenizer, *pair) for pair in item.options], item)
            for item in self.items(data, shots)
        ]

    def record(self, entry: Pairs, found: list[float]) -> Record:
        assert entry.choice is not None
        lengths = [len(end.removeprefix(" ")) for _, end in entry.choice.options]
        per_character = np.array(found) / lengths
        return {
            "id": entry.id,
            "correct": int(np.argmax(found)) == entry.choice.gold,
            "correct per character": int(np.argmax(per_character)) == entry.choice.gold,
            "log_likelihoods": found,
        }

    @property
    def measured(self) -> tuple[str, ...]:
        return "correct", "correct per character"

    def metrics(self, records: Sequence[Record]) -> dict[str, float]:
        return {
            "accuracy": mean(records, "correct"),
            "accuracy per character": mean(records, "correct per character"),
        }


@dataclasses.dataclass(frozen=True)
class TextTask(ScoredTask):
    """The perplexity of a text file in windows that do not overlap; each window is an item.

    name: the task's name on the command line.
    title: the task in a few words.
    file: the text, within the folder of data.
    window: tokens per window, or the model's number of positions where that is smaller.
    """

    name: str
    title: str
    file: str
    window: int = 2048

    def entries(self, setup: Setup, data: Path, shots: int | None) -> list[Pairs]:
        tokens = setup.tokenizer.encode(read_text(data / self.file))
        width = min(self.window, setup.params.config.max_position_embeddings)
        windows = [tokens[start : start + width] for start in range(0, len(tokens) - 1, width)]
        if not windows:
            raise ValueError(f"{data / self.file} holds no text of at least two tokens")
        return [Pairs(str(i), [(part[:1], part[1:])]) for i, part in enumerate(windows)]

    def record(self, entry: Pairs, found: list[float]) -> Record:
        return {"id": entry.id, "nats": -found[0], "scored": len(entry.pairs[0][1])}

    @property
    def measured(self) -> tuple[str, ...]:
        return "nats", "scored"

    def metrics(self, records: Sequence[Record]) -> dict[str, float]:
        nats, count = (sum(record[name] for record in records) for name in ("nats", "scored"))
        return {"perplexity": Perplexity(nats / count, count).perplexity}


def _split(tokenizer: TokenCodec, context: str, end: str) -> tuple[list[int], list[int]]:
    """The tokens of both texts together, split where those of the context alone end."""
    whole, alone = tokenizer.encode(context + end), tokenizer.encode(context)
    count = next(
        (i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), len(alone)
    )
    return whole[:count], whole[count:]
