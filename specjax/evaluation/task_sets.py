"""Whole task sets through one model: answers written, choices made, texts scored, all of it judged.

Answers are written greedily by continuous batching, so with any drafter they are those of plain
decoding. Likelihoods are read by the model itself, without a drafter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.activations import Activation, check_activation
from specjax.checks import check_integer
from specjax.drafting import Autoregressive, Drafter, QSpec
from specjax.evaluation.likelihood import log_likelihoods
from specjax.evaluation.runs import Record, Results
from specjax.evaluation.tasks import TASKS
from specjax.evaluation.tasks.base import Choice, ChoiceTask, Question, Task, TextTask, WrittenTask
from specjax.files.digests import digest
from specjax.files.json_lines import read_text
from specjax.generation.batching import Completion, complete
from specjax.generation.text import StopStrings, Tokenizer, output_text
from specjax.model.params import Params

_COUNTS = ("rounds", "drafted", "tested", "accepted", "generated")
_AHEAD = 4  # batches of likelihoods between two records on disk


class TaskProgress(NamedTuple):
    """How far a task is: its items done and in all, and what this process did of them: tokens
    written, drafts made and accepted, seconds."""

    task: str
    done: int
    total: int
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """What came of a task.

    task: its name.
    metrics: shares in 0 … 1, or a perplexity, by name; empty where only speed is measured, and
        where no item could be answered.
    refused: items that do not fit into the model's positions; metrics leave them out.
    records: one per item, in their order, as in the file of results.
    progress: what this process did; without items that an earlier one had done.
    """

    task: str
    metrics: dict[str, float]
    refused: int
    records: tuple[Record, ...]
    progress: TaskProgress

    def summary(self) -> Record:
        """The result in a few numbers."""
        numbers: Record = {"items": len(self.records), "refused": self.refused, **self.metrics}
        if isinstance(TASKS[self.task], WrittenTask):
            total = {name: sum(record.get(name, 0) for record in self.records) for name in _COUNTS}
            numbers["tokens"] = total["generated"]
            numbers["tokens per round"] = total["generated"] / max(total["rounds"], 1)
            if total["drafted"]:
                numbers["acceptance"] = total["accepted"] / total["drafted"]
            if self.progress.generated:
                numbers["tokens/s"] = self.progress.generated / self.progress.seconds
        return numbers


def evaluate(
    params: Params,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    data: str | Path,
    *,
    drafter: Drafter | None = None,
    rows: int = 8,
    limit: int | None = None,
    shots: int | None = None,
    max_new_tokens: int | None = None,
    activation: Activation = "a16",
    cache_bits: int = 16,
    chat: bool = False,
    out: str | Path | None = None,
    progress: Callable[[TaskProgress], None] | None = None,
) -> list[TaskResult]:
    """Evaluates a model on task sets.

    Args:
      params: the model.
      tokenizer: its tokenizer.
      tasks: names of tasks, of `specjax.evaluation.TASKS`.
      data: the folder of their files; docs/evaluation.md says what it holds.
      drafter: how written answers are drafted; default QSpec().
      rows: prompts that are decoded at a time, and texts per pass; under a mesh a multiple of its
        data axis.
      limit: only the first items of each task (windows, of a text); None: all.
      shots: worked examples before the questions of tasks that have them; None: what is customary.
      max_new_tokens: most tokens per answer; None: the tasks' own numbers.
      activation: activation precision of the model itself. "a8" and "a4" are without a drafter.
      cache_bits: bits per KV cache entry: 16, 8 or 4.
      chat: put what is to be answered into the tokenizer's chat template.
      out: a file of results, which a killed run is taken up from; see `specjax.evaluation.runs`.
      progress: called after every item.

    Returns:
      One result per task. An item that is too long for the model is reported in its record's
      `error`, and the others go on.

    Raises:
      FileNotFoundError: a task's file is missing.
      ValueError: an unknown task, a file that does not hold what it should, an argument out of its
        range, or `out` holds other results.
    """
    if activation != "a16" and drafter is not None:
        raise ValueError(
            f'drafter goes with activation "a16", got {activation!r}: low precision has no verifier'
        )
    check_activation(activation)
    if chat and not hasattr(tokenizer, "chat"):
        raise ValueError(f"chat needs a tokenizer of specjax.load_tokenizer, got {tokenizer!r}")
    for name, value in (("rows", rows), ("limit", limit), ("max_new_tokens", max_new_tokens)):
        if value is not None and check_integer(name, value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    chosen = _find(tasks)
    if drafter is None:
        drafter = QSpec() if activation == "a16" else Autoregressive()
    run = _Run(params, tokenizer, drafter, rows, max_new_tokens, activation, cache_bits, chat)
    items = {task.name: _items(run, task, Path(data), shots)[:limit] for task in chosen}
    settings = {}
    if out is not None:  # naming a model reads all of it
        settings = {
            "tasks": [task.name for task in chosen], "limit": limit, "shots": shots,
            "max_new_tokens": max_new_tokens, "activation": activation, "cache_bits": cache_bits,
            "chat": chat, "drafter": f"{type(drafter).__name__} {digest(drafter)}",
            "model": digest(params), "data": hashlib.sha256(repr(items).encode()).hexdigest()[:12],
        }  # fmt: skip
    with Results(None if out is None else Path(out), settings) as results:
        found = [_evaluate(run, task, items[task.name], results, progress) for task in chosen]
        results.finish((each.task, record["id"]) for each in found for record in each.records)
    return found


class _Run(NamedTuple):
    """What all tasks have in common."""

    params: Params
    tokenizer: Any
    drafter: Drafter
    rows: int
    max_new_tokens: int | None
    activation: Activation
    cache_bits: int
    chat: bool


class _Prompt(NamedTuple):
    """A turn of a question in the model's tokens. turns: questions and answers up to it."""

    question: Question
    turns: list[str]
    tokens: list[int]

    @property
    def id(self) -> str:
        turn = len(self.turns) // 2 + 1
        return self.question.id if turn == 1 else f"{self.question.id}/{turn}"


class _Pairs(NamedTuple):
    """Contexts and continuations in the model's tokens; `choice` is None for a part of a text."""

    id: str
    pairs: list[tuple[list[int], list[int]]]
    choice: Choice | None = None


def _find(names: Sequence[str]) -> list[Task]:
    if len(names) == 0 or isinstance(names, str):
        raise ValueError(f"tasks must be a list of names, got {names!r}")
    for name in names:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}; the tasks are {', '.join(TASKS)}")
        if list(names).count(name) > 1:
            raise ValueError(f"tasks holds {name!r} twice")
    return [TASKS[name] for name in names]


def _items(run: _Run, task: Task, data: Path, shots: int | None) -> list[Any]:
    if isinstance(task, WrittenTask):
        return [_prompt(run, task, item, [item.prompt]) for item in task.items(data, shots)]
    if isinstance(task, ChoiceTask):
        return [
            _Pairs(item.id, [_split(run.tokenizer, *pair) for pair in item.options], item)
            for item in task.items(data)
        ]
    tokens = run.tokenizer.encode(read_text(data / task.file))
    width = min(task.window, run.params.config.max_position_embeddings)
    windows = [tokens[start : start + width] for start in range(0, len(tokens) - 1, width)]
    if not windows:
        raise ValueError(f"{data / task.file} holds no text of at least two tokens")
    return [_Pairs(str(i), [(part[:1], part[1:])]) for i, part in enumerate(windows)]


def _prompt(run: _Run, task: WrittenTask, question: Question, turns: list[str]) -> _Prompt:
    """The last of some turns, to be answered."""
    if not run.chat:
        return _Prompt(question, turns, run.tokenizer.encode(task.plain(turns)))
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    text = run.tokenizer.chat(messages)
    return _Prompt(question, turns, run.tokenizer.encode(text, special_tokens=False))


def _later(run: _Run, task: WrittenTask, items: list[_Prompt], results: Results) -> list[_Prompt]:
    """The next turns of conversations, now that these are answered."""
    prompts = []
    for item in items:
        later = item.question.later[len(item.turns) // 2 :]
        answer = results.records[task.name, item.id].get("text")
        if later and answer is not None:
            turns = [*item.turns, answer, later[0]]
            prompts.append(_prompt(run, task, item.question, turns))
    return prompts


def _split(tokenizer: Tokenizer, context: str, end: str) -> tuple[list[int], list[int]]:
    """The tokens of both together, parted where those of the context alone end."""
    whole, alone = tokenizer.encode(context + end), tokenizer.encode(context)
    count = next(
        (i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), len(alone)
    )
    return whole[:count], whole[count:]


def _evaluate(
    run: _Run,
    task: Task,
    items: list[Any],
    results: Results,
    progress: Callable[[TaskProgress], None] | None,
) -> TaskResult:
    later = sum(len(item.question.later) for item in items if isinstance(item, _Prompt))
    done = sum(name == task.name for name, _ in results.records)
    state = TaskProgress(task.name, done, len(items) + later)
    begun = time.perf_counter()
    records: tuple[Record, ...] = ()
    while items:
        missing = [item for item in items if (task.name, item.id) not in results.records]
        for record in _records(run, task, missing):
            results.add({"task": task.name, **record})
            state = state._replace(
                done=state.done + 1,
                generated=state.generated + record.get("generated", 0),
                drafted=state.drafted + record.get("drafted", 0),
                accepted=state.accepted + record.get("accepted", 0),
                seconds=time.perf_counter() - begun,
            )
            if progress is not None:
                progress(state)
        records += tuple(results.records[task.name, item.id] for item in items)
        items = _later(run, task, items, results) if isinstance(task, WrittenTask) else []
    answered = [record for record in records if "error" not in record]
    metrics = _metrics(task, answered) if answered else {}
    return TaskResult(task.name, metrics, len(records) - len(answered), records, state)


def _records(run: _Run, task: Task, items: list[Any]) -> Iterator[Record]:
    """The record of every item, as soon as it is known."""
    if not items:
        return iter(())
    return _written(run, task, items) if isinstance(task, WrittenTask) else _scored(run, items)


def _written(run: _Run, task: WrittenTask, items: list[_Prompt]) -> Iterator[Record]:
    prompts = [item.tokens for item in items]
    length = task.max_new_tokens if run.max_new_tokens is None else run.max_new_tokens
    stop_when = StopStrings(run.tokenizer, prompts, task.stops) if task.stops else None
    finished = complete(
        run.params, prompts, drafter=run.drafter, rows=run.rows, max_new_tokens=length,
        cache_bits=run.cache_bits, activation=run.activation, stop_when=stop_when,
    )  # fmt: skip
    for index, completion in finished:
        yield _answer(run, task, items[index], completion)


def _answer(run: _Run, task: WrittenTask, item: _Prompt, completion: Completion) -> Record:
    if completion.error is not None:
        return {"id": item.id, "error": completion.error}
    tokens = completion.tokens[len(item.tokens) :].tolist()
    stop_tokens = run.params.config.stop_tokens
    text = task.cut(output_text(run.tokenizer, item.tokens, tokens, stop_tokens))
    verdict = task.judge(item.question, text)
    counts = {name: int(getattr(completion.stats, name)) for name in _COUNTS}
    return {"id": item.id, "correct": verdict.correct, "note": verdict.note, **counts,
            "text": text, "tokens": tokens}  # fmt: skip


def _scored(run: _Run, items: list[_Pairs]) -> Iterator[Record]:
    longest = run.params.config.max_position_embeddings
    fitting = []
    for item in items:
        length = max(len(end) for _, end in item.pairs)
        if length < longest:
            fitting.append(item)
        else:
            error = f"a continuation of {length} tokens; the model has {longest} positions"
            yield {"id": item.id, "error": error}
    for first in range(0, len(fitting), _AHEAD * run.rows):
        some = fitting[first : first + _AHEAD * run.rows]
        pairs = [pair for item in some for pair in item.pairs]
        scores = log_likelihoods(
            run.params, pairs, rows=run.rows, activation=run.activation, cache_bits=run.cache_bits
        )
        found = iter(scores)
        for item in some:
            yield _likelihoods(item, [next(found)[0] for _ in item.pairs])


def _likelihoods(item: _Pairs, found: list[float]) -> Record:
    if item.choice is None:
        return {"id": item.id, "nats": -found[0], "scored": len(item.pairs[0][1])}
    lengths = [len(end.removeprefix(" ")) for _, end in item.choice.options]
    return {
        "id": item.id,
        "correct": int(np.argmax(found)) == item.choice.gold,
        "correct per character": int(np.argmax(np.array(found) / lengths)) == item.choice.gold,
        "log_likelihoods": found,
    }


def _metrics(task: Task, records: list[Record]) -> dict[str, float]:
    def share(name: str) -> float:
        return float(np.mean([record[name] for record in records]))

    if isinstance(task, ChoiceTask):
        return {
            "accuracy": share("correct"),
            "accuracy per character": share("correct per character"),
        }
    if isinstance(task, TextTask):
        nats, count = (sum(record[name] for record in records) for name in ("nats", "scored"))
        return {"perplexity": math.exp(nats / count)}
    return {} if task.metric is None else {task.metric: share("correct")}
