"""Tasks whose answers are written: a prompt is continued, and the continuation judged.

Answers are decoded greedily by continuous batching, so they are those of plain decoding with any
drafter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.evaluation import sandbox
from specjax.evaluation.runs import Record
from specjax.evaluation.tasks.base import (
    Examples,
    Setup,
    Task,
    mean,
    read_items,
    worked_examples,
)
from specjax.files.json_lines import Line
from specjax.generation.batching import complete
from specjax.generation.completion import Completion
from specjax.generation.text import StopStrings, cut, output_text

_COUNTS = ("rounds", "drafted", "tested", "accepted", "generated")


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt to continue.

    reference: what the task's judge compares the answer with.
    later: questions that follow in the same conversation, each after the answer to the one before.
    kind: the kind of question that the file names, such as a subject; None where it names none.
    """

    id: str
    prompt: str
    reference: Any = None
    later: tuple[str, ...] = ()
    kind: str | None = dataclasses.field(default=None, repr=False)  # no part of a data's digest


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of an answer.

    correct: None where answers are not judged.
    note: a remark that is kept in the record.
    scores: the task's other scores of the answer, by name.
    """

    correct: bool | None
    note: str = ""
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Prompt(NamedTuple):
    """One turn of a question in the model's tokens.

    turns: the questions and answers up to it, in turn; the last is the question.
    """

    question: Question
    turns: list[str]
    tokens: list[int]

    @property
    def id(self) -> str:
        """The question's id, with the number of the turn from the second on."""
        turn = len(self.turns) // 2 + 1
        return self.question.id if turn == 1 else f"{self.question.id}/{turn}"


@dataclasses.dataclass(frozen=True)
class WrittenTask(Task[Prompt]):
    """A task whose answers are decoded.

    name: the task's name on the command line.
    title: the task in a few words.
    file: the file of items, within the folder of data.
    read: makes a question, without examples, of a line; None where the line is not an item.
    judge: the verdict on an answer to a question, cut at the first of `stops`.
    metric: the name of the share of correct answers; None where no answer is right or wrong.
    max_new_tokens: most tokens per answer.
    stops: texts that end an answer, because another question begins there. A blank line among them
        does not end one in a chat.
    frame: the layout of a question outside a chat template; "{}" stands for the question.
    judge_unsafe: where the judge runs what the model wrote: the same judge, also where nothing
        holds that; else None.
    shots: worked examples before every question.
    examples: makes their text.
    scores: the names of the judge's other scores, of which the mean is taken.
    """

    name: str
    title: str
    file: str
    read: Callable[[Line], Question | None]
    judge: Callable[[Question, str], Verdict]
    metric: str | None
    max_new_tokens: int
    stops: tuple[str, ...] = ()
    frame: str = "{}"
    judge_unsafe: Callable[[Question, str], Verdict] | None = None
    shots: int = 0
    examples: Examples | None = None
    scores: tuple[str, ...] = ()
    drafts = True

    def check(self, setup: Setup) -> None:
        if self.judge_unsafe is not None:
            sandbox.check(unsafe=setup.unsafe)

    def items(self, data: Path, shots: int | None = None) -> list[Question]:
        """The questions, each after `shots` worked examples; None: the task's own number.

        Raises ValueError where a file does not hold what it should, or has too few examples.
        """
        examples = worked_examples(self.examples, self.shots, shots, data)
        return [
            dataclasses.replace(item, prompt=examples + item.prompt)
            for item in read_items(data / self.file, self.read)
        ]

    def plain(self, turns: Sequence[str]) -> str:
        """A conversation as one text, which the next answer continues."""
        text = ""
        for number, turn in enumerate(turns):
            asked = number % 2 == 0
            text += "\n\n" if asked and text else ""
            text += self.frame.replace("{}", turn) if asked else turn
        return text

    def ends(self, chat: bool) -> tuple[str, ...]:
        """The texts that end an answer, in a chat template or outside it."""
        return tuple(text for text in self.stops if text.strip() or not chat)

    def cut(self, text: str, chat: bool = False) -> str:
        """An answer up to the first text that ends it."""
        return cut(text, self.ends(chat))

    def entries(self, setup: Setup, data: Path, shots: int | None) -> list[Prompt]:
        return [self._prompt(setup, item, [item.prompt]) for item in self.items(data, shots)]

    def kind(self, entry: Prompt) -> str | None:
        return entry.question.kind

    def turns(self, entries: Sequence[Prompt]) -> int:
        return sum(1 + len(entry.question.later) for entry in entries)

    def later(
        self, setup: Setup, entries: Sequence[Prompt], records: Sequence[Record]
    ) -> list[Prompt]:
        prompts = []
        for entry, record in zip(entries, records, strict=True):
            remaining = entry.question.later[len(entry.turns) // 2 :]
            answer = record.get("text")
            if remaining and answer is not None:
                turns = [*entry.turns, answer, remaining[0]]
                prompts.append(self._prompt(setup, entry.question, turns))
        return prompts

    def records(self, setup: Setup, entries: Sequence[Prompt]) -> Iterator[Record]:
        if not entries:
            return
        prompts = [entry.tokens for entry in entries]
        length = self.max_new_tokens if setup.max_new_tokens is None else setup.max_new_tokens
        ends = self.ends(setup.chat is not None)
        stop_when = StopStrings(setup.tokenizer, prompts, ends) if ends else None
        finished = complete(
            setup.params, prompts, drafter=setup.drafter, rows=setup.rows, max_new_tokens=length,
            cache_bits=setup.cache_bits, activation=setup.activation, stop_when=stop_when,
            share=False,  # counts are an item's own, also in a run that is taken up
        )  # fmt: skip
        for index, completion in finished:
            yield self._record(setup, entries[index], completion)

    @property
    def measured(self) -> tuple[str, ...]:
        return (*(() if self.metric is None else ("correct",)), *self.scores)

    def metrics(self, records: Sequence[Record]) -> dict[str, float]:
        shares = {} if self.metric is None else {self.metric: mean(records, "correct")}
        return shares | {name: mean(records, name) for name in self.scores}

    def counts(self, records: Sequence[Record]) -> dict[str, float]:
        total = {name: sum(record.get(name, 0) for record in records) for name in _COUNTS}
        counts: dict[str, float] = {
            "tokens": total["generated"],
            "tokens per round": total["generated"] / max(total["rounds"], 1),
        }
        if total["drafted"]:
            counts["acceptance"] = total["accepted"] / total["drafted"]
        return counts

    def _prompt(self, setup: Setup, question: Question, turns: list[str]) -> Prompt:
        """The last of some turns, to be answered."""
        if setup.chat is None:
            return Prompt(question, turns, setup.tokenizer.encode(self.plain(turns)))
        roles = itertools.cycle(("user", "assistant"))
        messages = [
            {"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)
        ]
        text = setup.chat.chat(messages)
        return Prompt(question, turns, setup.chat.encode(text, special_tokens=False))

    def _record(self, setup: Setup, entry: Prompt, completion: Completion) -> Record:
        if completion.error is not None:
            return {"id": entry.id, "error": completion.error}
        tokens = completion.tokens[len(entry.tokens) :].tolist()
        stop_tokens = setup.params.config.stop_tokens
        whole = output_text(setup.tokenizer, entry.tokens, tokens, stop_tokens)
        text = self.cut(whole, setup.chat is not None)
        unsafe = self.judge_unsafe if setup.unsafe else None
        verdict = (unsafe or self.judge)(entry.question, text)
        counts = {name: int(getattr(completion.stats, name)) for name in _COUNTS}
        return {"id": entry.id, "correct": verdict.correct, "note": verdict.note, **verdict.scores,
                **counts, "text": text, "tokens": tokens}  # fmt: skip
