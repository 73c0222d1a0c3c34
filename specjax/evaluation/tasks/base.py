"""What a task is: items read from a local file, and how an answer to one of them is judged.

Three kinds. A `WrittenTask` has a prompt to continue; a `ChoiceTask` has options of which the model
finds one the most likely; a `TextTask` is a text whose perplexity is wanted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax.files.json_lines import Line, read_lines
from specjax.generation.text import cut


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt to continue.

    reference: what the task's judge compares the answer with.
    later: what is asked in turn, once the questions before are answered.
    """

    id: str
    prompt: str
    reference: Any = None
    later: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Choice:
    """Pairs of a context and its continuation, of which number `gold` is right."""

    id: str
    options: tuple[tuple[str, str], ...]
    gold: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """correct: None where nothing is judged. note: what is worth keeping beside it."""

    correct: bool | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class WrittenTask:
    """Answers are written.

    name: what the command line calls it.
    file: of the items, within the folder of data.
    read: a line of it to a question without examples; None where the line is no item.
    judge: the question and the answer, cut at the first of `stops`, to a verdict.
    metric: what the share of correct answers is called; None where only speed is measured.
    max_new_tokens: per answer.
    stops: texts that end an answer; what follows is the beginning of another question.
    frame: how a question reads where it is not put to a chat model; it stands for "{}".
    shots: worked examples before every question.
    examples: the folder of data and their number to the text of the examples.
    """

    name: str
    file: str
    read: Callable[[Line], Question | None]
    judge: Callable[[Question, str], Verdict]
    metric: str | None
    max_new_tokens: int
    stops: tuple[str, ...] = ()
    frame: str = "{}"
    shots: int = 0
    examples: Callable[[Path, int], str] | None = None

    def items(self, data: Path, shots: int | None = None) -> list[Question]:
        """The task's questions, after `shots` worked examples; None: as many as is customary.

        Raises ValueError for what is wrong with the files, and shots that there are not.
        """
        shots = self.shots if shots is None or self.examples is None else shots
        if shots < 0:
            raise ValueError(f"shots must be at least 0, got {shots}")
        examples = self.examples(data, shots) if self.examples and shots else ""
        return [
            dataclasses.replace(item, prompt=examples + item.prompt)
            for item in _read(data / self.file, self.read)
        ]

    def plain(self, turns: Sequence[str]) -> str:
        """Questions and answers by turns as one text, which the next answer continues."""
        text = ""
        for number, turn in enumerate(turns):
            asked = number % 2 == 0
            text += "\n\n" if asked and text else ""
            text += self.frame.replace("{}", turn) if asked else turn
        return text

    def cut(self, text: str) -> str:
        """An answer without what follows the first of `stops`."""
        return cut(text, self.stops)


@dataclasses.dataclass(frozen=True)
class ChoiceTask:
    """The model's choice is the option with the most likely continuation. Fields as above."""

    name: str
    file: str
    read: Callable[[Line], Choice]

    def items(self, data: Path) -> list[Choice]:
        """The task's items. Raises ValueError for what is wrong with the file."""
        return _read(data / self.file, self.read)


@dataclasses.dataclass(frozen=True)
class TextTask:
    """The perplexity of a text file in windows that do not overlap, each an item of its own.

    window: tokens, or as many as the model has positions.
    """

    name: str
    file: str
    window: int = 2048


Task = WrittenTask | ChoiceTask | TextTask


def _read(path: Path, read: Callable[[Line], Any]) -> list[Any]:
    """The items of a file, none of them twice."""
    items: list[Any] = []
    seen: dict[str, int] = {}
    for line in read_lines(path):
        item = read(line)
        if item is None:
            continue
        if item.id in seen:
            raise ValueError(
                f"line {line.number} of {path} has the id {item.id!r} of line {seen[item.id]}"
            )
        seen[item.id] = line.number
        items.append(item)
    if not items:
        raise ValueError(f"{path} holds no items")
    return items


def unjudged(question: Question, answer: str) -> Verdict:
    """Of a task that measures speed alone."""
    return Verdict(None)


def some_examples(path: Path, shots: int, read: Callable[[Line], str | None]) -> str:
    """The first worked examples of a file. Raises ValueError where it has too few."""
    found = [text for line in read_lines(path) if (text := read(line)) is not None]
    if shots > len(found):
        raise ValueError(f"{path} holds {len(found)} examples, shots={shots}")
    return "".join(found[:shots])
