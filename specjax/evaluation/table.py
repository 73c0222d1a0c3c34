"""QSpec's table 3: the scores that quantized weights and activations lose on tasks.

A quantized model has four lines: plain decoding with 16-bit activations (W4A16), QSpec, and plain
decoding with low-precision activations (W4A8, W4A4). A 16-bit model has one: plain decoding
(W16A16). QSpec's scores are W4A16's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from pallas_kernels.activations import Activation
from specjax.drafting import Autoregressive, Drafter, QSpec
from specjax.evaluation.task_sets import TaskOptions, TaskProgress, TaskResult, evaluate
from specjax.evaluation.tasks import TASKS
from specjax.files.markdown import markdown_table
from specjax.generation.text import TokenCodec
from specjax.model.params import Params


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    scheme: the model's name.
    method: "W16A16", "W4A16", "QSpec", "W4A8" or "W4A4".
    results: one per task, in the order of the tasks.
    plain: the results of plain decoding with the same weights and 16-bit activations.
    """

    scheme: str
    method: str
    results: tuple[TaskResult, ...]
    plain: tuple[TaskResult, ...]

    @property
    def compared(self) -> list[bool]:
        """Whether each written answer has the tokens of plain decoding."""
        return [
            mine["tokens"] == other["tokens"]
            for result, reference in zip(self.results, self.plain, strict=True)
            for mine, other in zip(result.records, reference.records, strict=True)
            if "tokens" in mine and "tokens" in other
        ]


def fidelity_rows(
    scheme: str,
    params: Params,
    tokenizer: TokenCodec,
    tasks: Sequence[str],
    data: str | Path,
    *,
    drafter: QSpec | None = None,
    out: str | Path | None = None,
    progress: Callable[[str, TaskProgress], None] | None = None,
    **options: Unpack[TaskOptions],
) -> Iterator[Row]:
    """Measures the lines of one model: the four methods of a quantized one, or W16A16 alone.

    The target reads likelihoods without drafts, so QSpec's are W4A16's and are not read again.

    Args:
      scheme: the model's name in the table.
      params: the model.
      tokenizer: its tokenizer.
      tasks: names of tasks.
      data: the folder of their files.
      drafter: the drafter of the line "QSpec"; default QSpec(activation="a4"), the paper's.
      out: a folder for the files of results, one per line of the table.
      progress: called with the method and its progress after every item.
      options: as for `evaluate`.

    Yields:
      Each line as soon as it is measured.

    Raises:
      ValueError: as `evaluate` does.
    """

    def run(
        method: str,
        names: Sequence[str],
        drafter: Drafter | None = None,
        activation: Activation = "a16",
    ) -> tuple[TaskResult, ...]:
        report = None if progress is None else lambda state: progress(method, state)
        file = None if out is None else Path(out) / f"{scheme}-{method}.jsonl"
        given = options
        if set(names) != set(tasks) and isinstance(shots := options.get("shots"), Mapping):
            given = {**options, "shots": {name: shots[name] for name in names if name in shots}}
        results = evaluate(
            params, tokenizer, names, data, drafter=drafter, activation=activation, out=file,
            progress=report, **given,
        )  # fmt: skip
        return tuple(results)

    if not params.quantized:
        plain = run("W16A16", tasks, drafter=Autoregressive())
        yield Row(scheme, "W16A16", plain, plain)
        return
    plain = run("W4A16", tasks, drafter=Autoregressive())
    yield Row(scheme, "W4A16", plain, plain)
    written = [name for name in tasks if TASKS[name].drafts]
    drafted = run("QSpec", written, drafter=drafter or QSpec(activation="a4")) if written else ()
    by_name = {each.task: each for each in (*plain, *drafted)}
    yield Row(scheme, "QSpec", tuple(by_name.values()), plain)
    low: tuple[Activation, ...] = ("a8", "a4")
    for activation in low:
        method = f"W4{activation.upper()}"
        yield Row(scheme, method, run(method, tasks, activation=activation), plain)


def format_table(rows: Sequence[Row]) -> str:
    """The table in Markdown: every task's first metric, and its relative distance from W4A16's."""
    tasks = [result.task for result in rows[0].results]
    lines = []
    for row in rows:
        cells = map(_cell, row.results, row.plain)
        same = row.compared
        differing = "" if row.results is row.plain else f"{same.count(False)} of {len(same)}"
        lines.append([row.scheme, row.method, *cells, differing])
    return markdown_table(("model", "method", *tasks, "answers that differ"), lines)


def _cell(result: TaskResult, reference: TaskResult) -> str:
    """A share in percent or a perplexity, and its relative distance from the reference."""
    if not result.metrics:
        return "–"
    (name, value), *_ = result.metrics.items()
    text = f"{value:.3f}" if name == "perplexity" else f"{value:.1%}"
    other = reference.metrics.get(name)
    return text if not other or other == value else f"{text} ({value / other - 1:+.1%})"
