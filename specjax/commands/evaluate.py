"""`specjax evaluate`: task sets, perplexity, and how much of it low precision costs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import specjax
from pallas_kernels.activations import ACTIVATIONS, LEVELS, Activation
from specjax.checks import printable, shown
from specjax.commands.drafters import add_drafter, make_drafter, read_drafter
from specjax.commands.files import check_picture, pyplot, save_picture, write_json
from specjax.commands.options import (
    add_cache_bits,
    add_json,
    add_model,
    add_output,
    add_picture,
    add_quantize,
    add_sample_seed,
    at_least,
    chosen_target,
    integer,
)
from specjax.commands.prompts import read_prompts
from specjax.evaluation import TASKS, Fidelity, TaskProgress, evaluate, fidelity, perplexity
from specjax.evaluation.progress_bar import progress_bar
from specjax.evaluation.table import Row, fidelity_rows, format_table
from specjax.evaluation.task_sets import TaskOptions
from specjax.files.json_lines import read_text


def add(commands: Any) -> None:
    """Adds the command and its kinds of evaluation."""
    help_ = "run task sets, measure perplexity and what low precision costs"
    more = "Several tasks may be named: specjax evaluate gsm8k humaneval piqa --data DATA"
    parser = commands.add_parser("evaluate", help=help_, description=help_, epilog=more)
    kinds = parser.add_subparsers(title="tasks and measures", required=True, metavar="TASK")
    for name, task in TASKS.items():
        _add_tasks(kinds.add_parser(name, help=task.title, description=task.title), name)
    for name, help_, describe in (
        ("perplexity", "perplexity of a text, in sliding windows", _add_perplexity),
        ("fidelity", "probabilities at two activation precisions (QSpec, figure 2)", _add_fidelity),
        ("table", "tasks with W16A16, W4A16, QSpec, W4A8, W4A4 (QSpec, table 3)", _add_table),
    ):
        describe(kinds.add_parser(name, help=help_, description=help_))


def _add_tasks(parser: argparse.ArgumentParser, first: str) -> None:
    add = parser.add_argument
    add("others", nargs="*", metavar="TASK", help="more tasks: " + ", ".join(TASKS))
    add_model(parser)
    add_quantize(parser)
    add_cache_bits(parser)
    _add_task_options(parser)
    help_ = "write results to this file; a killed run continues from it"
    add_output(parser, "--out", metavar="FILE", help=help_)
    add_drafter(parser)
    parser.set_defaults(run=_tasks, first=first)


def _add_table(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("tasks", nargs="+", metavar="TASK", help=", ".join(TASKS))
    help_ = "models with their names in the table; a 16-bit one is W16A16"
    add("--models", nargs="+", type=_named, required=True, metavar="NAME=MODEL", help=help_)
    _add_task_options(parser)
    help_ = "QSpec's tokens per draft; 3 if left out"
    add("--draft-length", type=integer, default=3, metavar="N", help=help_)
    help_ = "QSpec's activation precision of the draft; a4, the paper's, if left out"
    add("--draft-activation", choices=tuple(LEVELS), default="a4", help=help_)
    add_cache_bits(parser)
    help_ = "write results to this folder; a killed run continues from it"
    add_output(parser, "--out", directory=True, metavar="DIR", help=help_)
    parser.set_defaults(run=_table)


def _add_task_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="the folder of the tasks' files")
    help_ = "prompts decoded at a time, and texts per pass; 8 if left out"
    add("--rows", type=integer, default=8, metavar="N", help=help_)
    help_ = "items per task, the first ones; all if left out"
    add("--limit", type=at_least(1), metavar="N", help=help_)
    add_sample_seed(parser)
    help_ = "take as many of --limit items of every kind that the file names: MATH's subjects"
    add("--balanced", action="store_true", help=help_)
    help_ = "worked examples before each question; the task's own number if left out"
    add("--shots", type=_shots, metavar="N|TASK=N,…", help=help_)
    help_ = "most tokens per answer; the task's own number if left out"
    add("--max-new-tokens", type=integer, metavar="N", help=help_)
    add("--chat", action="store_true", help="put the questions into the model's chat template")
    help_ = "run programs that the model writes where nothing holds them too"
    add("--unsafe", action="store_true", help=help_)
    add_json(parser)


def _shots(text: str) -> int | dict[str, int]:
    """A number for all tasks, or one for each of some: piqa=10,winogrande=5."""
    if "=" not in text:
        return integer(text)
    pairs = [part.partition("=") for part in text.split(",")]
    found = {name.strip(): integer(count) for name, _, count in pairs}
    if len(found) < len(pairs):
        raise argparse.ArgumentTypeError(f"must name each task once, got {shown(text)}")
    return found


def _named(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not name or not model or "/" in name:
        raise argparse.ArgumentTypeError(f"must be NAME=MODEL, got {text!r}")
    return name, model


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("text", type=Path, help="a text file, such as WikiText-2's")
    add_model(parser)
    help_ = "activation precision of the model; a16 if left out"
    add("--activation", choices=ACTIVATIONS, default="a16", help=help_)
    add_cache_bits(parser)
    add(
        "--window",
        type=integer,
        default=512,
        metavar="N",
        help="tokens per window; 512 if left out",
    )
    help_ = "tokens from one window's start to the next's; --window if left out"
    add("--stride", type=integer, metavar="N", help=help_)
    add(
        "--max-tokens",
        type=at_least(2),
        metavar="N",
        help="tokens of the text, the first ones; all if left out",
    )
    add("--rows", type=integer, default=1, metavar="N", help="windows per pass; 1 if left out")
    add_json(parser)
    parser.set_defaults(run=_perplexity)


def _add_fidelity(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompts", type=Path, help="a file of prompts: JSON lines, or one text per line")
    add_model(parser)
    help_ = "activation precision that is compared with a16; a4 if left out"
    add("--compared", choices=tuple(LEVELS), default="a4", help=help_)
    add(
        "--limit",
        type=at_least(1),
        metavar="N",
        help="prompts of the file, the first ones; all if left out",
    )
    help_ = "most tokens per prompt; 128 if left out"
    add("--max-new-tokens", type=integer, default=128, metavar="N", help=help_)
    add("--rows", type=integer, default=1, metavar="N", help="prompts per pass; 1 if left out")
    add_json(parser)
    add_picture(parser, "draw the scatter plot into this file")
    parser.set_defaults(run=_fidelity)


def _perplexity(options: argparse.Namespace) -> None:
    text = read_text(options.text)
    params = specjax.load(options.model)
    tokens = specjax.load_tokenizer(options.model).encode(text)[: options.max_tokens]
    with progress_bar("pass") as progress:
        result = perplexity(
            params, tokens, window=options.window, stride=options.stride, rows=options.rows,
            activation=options.activation, cache_bits=options.cache_bits, progress=progress,
        )  # fmt: skip
    numbers = {
        "perplexity": result.perplexity,
        "nats": result.nats,
        "bits per byte": result.nats * (len(tokens) - 1) / len(text.encode()) / np.log(2),
        "tokens": result.tokens,
    }
    if options.max_tokens is not None:
        del numbers["bits per byte"]  # the part's size in bytes is not known
    _report(numbers, options.json)


def _fidelity(options: argparse.Namespace) -> None:
    check_picture(options.picture)
    texts = read_prompts(options.prompts, options.limit)
    params = specjax.load(options.model)
    tokenizer = specjax.load_tokenizer(options.model)
    prompts = [tokenizer.encode(text) for text in texts]
    result = fidelity(
        params, prompts, activation=options.compared,
        max_new_tokens=options.max_new_tokens, rows=options.rows,
    )  # fmt: skip
    _report(result.summary(), options.json)
    if options.picture is not None:
        _draw(result, options.compared, options.picture)


def _tasks(options: argparse.Namespace) -> None:
    target = chosen_target(options)
    with _bar() as progress:
        results = evaluate(
            target.params, specjax.load_tokenizer(options.model), [options.first, *options.others],
            options.data, drafter=make_drafter(read_drafter(options), target),
            out=options.out, progress=progress, **_task_options(options),
        )  # fmt: skip
    for each in results:
        numbers = (_number(name, value) for name, value in each.summary().items())
        print(f"{each.task}: {', '.join(numbers)}")
        if each.refused:
            error = next(filter(None, (record.get("error") for record in each.records)))
            print(f"  refused: {printable(error)}")
    write_json(options.json, {each.task: each.summary() for each in results})


def _table(options: argparse.Namespace) -> None:
    names = [name for name, _ in options.models]
    if len(set(names)) < len(names):
        raise ValueError(f"--models must have different names, got {', '.join(names)}")
    rows = [row for name, model in options.models for row in _table_rows(options, name, model)]
    print(format_table(rows))
    write_json(options.json, [_row_numbers(row) for row in rows])


def _table_rows(options: argparse.Namespace, name: str, model: str) -> list[Row]:
    with _bar() as show:

        def progress(method: str, state: TaskProgress) -> None:
            show(state._replace(task=f"{name} {method} {state.task}"))

        rows = fidelity_rows(
            name, specjax.load(model), specjax.load_tokenizer(model), options.tasks, options.data,
            drafter=specjax.QSpec(options.draft_length, options.draft_activation),
            out=options.out, progress=progress, **_task_options(options),
        )  # fmt: skip
        return list(rows)


def _row_numbers(row: Row) -> dict[str, Any]:
    numbers = {each.task: each.summary() for each in row.results}
    differing = {"answers": len(row.compared), "differing": row.compared.count(False)}
    return {"model": row.scheme, "method": row.method, **differing, **numbers}


def _task_options(options: argparse.Namespace) -> TaskOptions:
    return {
        "rows": options.rows, "limit": options.limit, "sample_seed": options.sample_seed,
        "balanced": options.balanced, "shots": options.shots,
        "max_new_tokens": options.max_new_tokens,
        "cache_bits": options.cache_bits, "chat": options.chat, "unsafe": options.unsafe,
    }  # fmt: skip


@contextmanager
def _bar() -> Iterator[Any]:
    """A progress bar of each task: items, time left, tokens per second, acceptance."""
    with tqdm(unit="item", leave=False) as bar:

        def show(state: TaskProgress) -> None:
            if bar.desc != f"{state.task}: ":
                bar.reset(state.total)
                bar.initial = state.done - 1
                bar.set_description(state.task, refresh=False)
                bar.set_postfix_str("", refresh=False)
            if state.generated:
                rate = f"{state.generated / state.seconds:.1f} tokens/s"
                accepted = (
                    f", {state.accepted / state.drafted:.0%} accepted" if state.drafted else ""
                )
                bar.set_postfix_str(rate + accepted, refresh=False)
            bar.update(state.done - bar.n)

        yield show


def _number(name: str, value: float) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def _report(numbers: dict[str, float], target: Path | None) -> None:
    for name, value in numbers.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    write_json(target, numbers)


def _draw(result: Fidelity, activation: Activation, target: Path) -> None:
    """Every token's two probabilities, with their distributions at the margins."""
    plot = pyplot()
    places: dict[str, Any] = {"width_ratios": (4, 1), "height_ratios": (1, 4)}
    figure, parts = plot.subplot_mosaic("a.;bc", figsize=(6, 6), gridspec_kw=places)
    axes, bins = parts["b"], np.linspace(0, 1, 41)
    for accepted, colour, label in (
        (True, "tab:green", "accepted"),
        (False, "tab:red", "rejected"),
    ):
        chosen = result.accepted == accepted
        label = f"{label} ({chosen.mean():.1%})"
        axes.scatter(
            result.precise[chosen], result.drafted[chosen], s=4, alpha=0.4, c=colour, label=label
        )
        for name, values, lies in (
            ("a", result.precise, "vertical"),
            ("c", result.drafted, "horizontal"),
        ):
            parts[name].hist(
                values[chosen], bins, histtype="step", color=colour, log=True, orientation=lies
            )
    parts["a"].sharex(axes)
    parts["a"].set_ylabel("tokens")
    parts["a"].tick_params(labelbottom=False)
    parts["c"].sharey(axes)
    parts["c"].set_xlabel("tokens")
    parts["c"].tick_params(labelleft=False)
    axes.set(xlabel="probability under a16", ylabel=f"probability under {activation}")
    axes.legend(loc="upper left")
    save_picture(figure, target, dpi=120, bbox_inches="tight")
    plot.close(figure)
