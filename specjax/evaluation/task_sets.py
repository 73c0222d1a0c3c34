"""Runs whole task sets on one model: answers are written, options chosen, texts scored, and judged.

Answers are written greedily by continuous batching, so they are those of plain decoding with any
drafter. Likelihoods are read by the model itself, without a drafter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from pallas_kernels.activations import Activation, check_activation
from specjax.checks import check_integer, check_seed
from specjax.drafting import Auto, Autoregressive, Drafter
from specjax.evaluation.digests import digest
from specjax.evaluation.runs import Record, Results
from specjax.evaluation.samples import sample
from specjax.evaluation.tasks import TASKS
from specjax.evaluation.tasks.base import Identified, Setup, Task
from specjax.generation.text import ChatTokenizer, TokenCodec
from specjax.model.params import Params


class TaskOptions(TypedDict, total=False):
    """The options of `evaluate` that say how tasks are asked, whatever decodes the answers."""

    rows: int
    limit: int | None
    sample_seed: int | None
    balanced: bool
    shots: int | Mapping[str, int] | None
    max_new_tokens: int | None
    cache_bits: int
    chat: bool
    unsafe: bool


class TaskProgress(NamedTuple):
    """The progress of a task.

    done, total: its items that are done, and all of them.
    generated, drafted, accepted: tokens that this process wrote, drafted and accepted.
    seconds: the time that this process took.
    """

    task: str
    done: int
    total: int
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    task: its name.
    metrics: shares in 0 … 1, or a perplexity, by name; empty where only speed is measured, and
        where no item could be answered.
    refused: items that do not fit into the model's positions; metrics leave them out.
    records: one per item, in their order, as in the file of results.
    progress: the work of this process, without items that an earlier one had done.
    """

    task: str
    metrics: dict[str, float]
    refused: int
    records: tuple[Record, ...]
    progress: TaskProgress

    def summary(self) -> Record:
        """The result in a few numbers."""
        numbers: Record = {"items": len(self.records), "refused": self.refused, **self.metrics}
        numbers |= TASKS[self.task].counts(self.records)
        if self.progress.generated:
            numbers["tokens/s"] = self.progress.generated / self.progress.seconds
        return numbers


def evaluate(
    params: Params,
    tokenizer: TokenCodec,
    tasks: Sequence[str],
    data: str | Path,
    *,
    drafter: Drafter | None = None,
    rows: int = 8,
    limit: int | None = None,
    sample_seed: int | None = None,
    balanced: bool = False,
    shots: int | Mapping[str, int] | None = None,
    max_new_tokens: int | None = None,
    activation: Activation = "a16",
    cache_bits: int = 16,
    chat: bool = False,
    unsafe: bool = False,
    out: str | Path | None = None,
    progress: Callable[[TaskProgress], None] | None = None,
) -> list[TaskResult]:
    """Evaluates a model on task sets.

    Args:
      params: the model.
      tokenizer: its tokenizer.
      tasks: names from `specjax.evaluation.TASKS`.
      data: the folder of their files; docs/evaluation.md lists them.
      drafter: how written answers are drafted; default Auto().
      rows: prompts that are decoded at a time, and texts per pass; under a mesh a multiple of its
        data axis.
      limit: use so many items of each task alone (windows of a text); None: all.
      sample_seed: decides which; None: the first ones.
      balanced: take as many of the `limit` items of every kind that a task's file names: MATH's
        subjects.
      shots: worked examples before the questions of tasks that have them, of all or by task; None:
        the tasks' own numbers.
      max_new_tokens: most tokens per answer; None: the tasks' own numbers.
      activation: activation precision of the model itself. "a8" and "a4" decode without a drafter.
      cache_bits: bits per KV cache entry: 16, 8 or 4.
      chat: put the questions into the tokenizer's chat template.
      unsafe: run programs that the model writes where nothing holds them too.
      out: a file of results; a killed run continues from it. See `specjax.evaluation.runs`.
      progress: called after every item.

    Returns:
      One result per task. An item that is too long for the model has an `error` in its record; the
      other items are not affected.

    Raises:
      FileNotFoundError: a task's file is missing.
      ValueError: a task is unknown, a file does not hold what it should, an argument is out of its
        range, `out` holds other results, or a task runs programs, which this system cannot hold.
    """
    if activation != "a16" and drafter is not None:
        raise ValueError(
            f'drafter goes with activation "a16", got {activation!r}: low precision has no verifier'
        )
    check_activation(activation)
    template = tokenizer if isinstance(tokenizer, ChatTokenizer) else None
    if chat and template is None:
        raise ValueError(f"chat needs a tokenizer of specjax.load_tokenizer, got {tokenizer!r}")
    for name, value in (("rows", rows), ("limit", limit), ("max_new_tokens", max_new_tokens)):
        if value is not None and check_integer(name, value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sample_seed is not None:
        check_seed("sample_seed", sample_seed)
    if balanced and limit is None:
        raise ValueError("balanced goes with limit, got None: all items are taken")
    chosen = _find(tasks)
    if drafter is None:
        drafter = Auto() if activation == "a16" else Autoregressive()
    setup = Setup(
        params, tokenizer, drafter, rows, max_new_tokens, activation, cache_bits,
        template if chat else None, unsafe,
    )  # fmt: skip
    for task in chosen:
        task.check(setup)
    counts = _shots(shots, tasks)
    entries = {
        task.name: task.entries(setup, Path(data), count)
        for task, count in zip(chosen, counts, strict=True)
    }
    if balanced and not any(task.kind(each) for task in chosen for each in entries[task.name]):
        raise ValueError(
            f"balanced needs a task whose file names kinds, such as math, got {', '.join(tasks)}"
        )
    for task in chosen:
        kind = task.kind if balanced else None
        entries[task.name] = sample(entries[task.name], limit, sample_seed, kind)
    settings: Record = {}
    if out is not None:  # the digest of a model reads all of it
        data_digest = hashlib.sha256(repr(entries).encode()).hexdigest()[:12]
        settings = {
            "tasks": [task.name for task in chosen], "limit": limit,
            "shots": dict(shots) if isinstance(shots, Mapping) else shots,
            **({} if sample_seed is None else {"sample_seed": sample_seed}),
            "max_new_tokens": max_new_tokens, "activation": activation, "cache_bits": cache_bits,
            "chat": chat, "drafter": f"{type(drafter).__name__} {digest(drafter)}",
            "model": digest(params), "data": data_digest,
        }  # fmt: skip
    with Results(None if out is None else Path(out), settings) as results:
        found = [_evaluate(setup, task, entries[task.name], results, progress) for task in chosen]
        results.finish((each.task, record["id"]) for each in found for record in each.records)
    return found


def _find(names: Sequence[str]) -> list[Task[Any]]:
    if len(names) == 0 or isinstance(names, str):
        raise ValueError(f"tasks must be a list of names, got {names!r}")
    for name in names:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}; the tasks are {', '.join(TASKS)}")
        if list(names).count(name) > 1:
            raise ValueError(f"tasks holds {name!r} twice")
    return [TASKS[name] for name in names]


def _shots(shots: int | Mapping[str, int] | None, tasks: Sequence[str]) -> list[int | None]:
    """The number of worked examples of every task."""
    if not isinstance(shots, Mapping):
        return [shots for _ in tasks]
    for name, count in shots.items():
        if name not in tasks:
            raise ValueError(f"shots names {name!r}; the tasks are {', '.join(tasks)}")
        if count and getattr(TASKS[name], "examples", None) is None:
            raise ValueError(
                f"shots must be 0 for {name}, which has no worked examples, got {count}"
            )
    return [shots.get(name) for name in tasks]


def _evaluate(
    setup: Setup,
    task: Task[Identified],
    entries: Sequence[Identified],
    results: Results,
    progress: Callable[[TaskProgress], None] | None,
) -> TaskResult:
    """Answers the entries, turn by turn, and judges what has no record yet."""
    done = sum(name == task.name for name, _ in results.records)
    state = TaskProgress(task.name, done, task.turns(entries))
    begun = time.perf_counter()
    records: list[Record] = []
    while entries:
        missing = [entry for entry in entries if (task.name, entry.id) not in results.records]
        for record in task.records(setup, missing):
            results.add({"task": task.name, **record})
            state = _advanced(state, record, time.perf_counter() - begun)
            if progress is not None:
                progress(state)
        known = [results.get(task.name, entry.id, task.measured) for entry in entries]
        records += known
        entries = task.later(setup, entries, known)
    answered = [record for record in records if "error" not in record]
    metrics = task.metrics(answered) if answered else {}
    return TaskResult(task.name, metrics, len(records) - len(answered), tuple(records), state)


def _advanced(state: TaskProgress, record: Record, seconds: float) -> TaskProgress:
    """The progress with one record more."""
    return state._replace(
        done=state.done + 1,
        generated=state.generated + record.get("generated", 0),
        drafted=state.drafted + record.get("drafted", 0),
        accepted=state.accepted + record.get("accepted", 0),
        seconds=seconds,
    )
