"""`specjax plan`: memory, speed-up, skipped layers and costs, before anything is decoded."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import specjax
from pallas_kernels.activations import ACTIVATIONS
from specjax import planning
from specjax.commands.drafters import add_drafter, make_drafter, read_drafter
from specjax.commands.files import check_picture, read_config, write_json
from specjax.commands.options import (
    add_cache_bits,
    add_group_size,
    add_json,
    add_model,
    add_picture,
    add_quantize,
    at_least,
    chosen_target,
    integer,
)
from specjax.commands.plan_pictures import draw_layers, draw_memory, draw_speed
from specjax.commands.prompts import read_prompts
from specjax.drafting.calibration import calibrate
from specjax.drafting.costs import WIDTHS
from specjax.evaluation.progress_bar import progress_bar
from specjax.files.json_lines import read_text
from specjax.model.sizes import FORMATS, in_units, most_that_fits
from specjax.planning.speed import LONGEST, Level, check_longest, fastest_for_each

UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
MOST_ROWS = 4096  # that the memory plan tries
_DIGITS = 30  # of a size
COUNTS = ("most rows", "longest context")


def add(commands: Any) -> None:
    """Adds the command and its kinds of plan."""
    help_ = "estimate memory and speed-up, find layers, or measure costs"
    parser = commands.add_parser("plan", help=help_, description=help_)
    kinds = parser.add_subparsers(title="plans", required=True, metavar="KIND")
    for name, help_, describe, run in (
        ("memory", "memory of the target, the draft and their caches", _add_memory, _memory),
        ("speed", "speed-up and best draft length", _add_speed, _speed),
        ("layers", "layers to draft with by --drafter layer-skip", _add_layers, _layers),
    ):
        each = kinds.add_parser(name, help=help_, description=help_)
        describe(each)
        add_json(each)
        add_picture(each, "draw them into this file")
        each.set_defaults(run=run)
    help_ = "measure the costs by which the default drafter chooses"
    each = kinds.add_parser("calibrate", help=help_, description=help_)
    _add_calibrate(each)
    add_json(each)
    each.set_defaults(run=_calibrate)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    formats = ", ".join(FORMATS)
    help_ = f"weight format of the target: {formats}; the model's own if left out"
    add("--weights", choices=FORMATS, metavar="FORMAT", help=help_)
    help_ = "weight format of a draft that is a cast of the target"
    add("--draft-weights", choices=FORMATS, metavar="FORMAT", help=help_)
    add("--draft", metavar="MODEL", help="a model that drafts instead of a cast")
    add("--draft-lm-head", action="store_true", help="quantize the output head of the draft too")
    add("--share-cache", action="store_true", help="let a cast draft from the target's KV cache")
    add_group_size(parser)
    add_cache_bits(parser)
    add("--rows", type=integer, default=1, metavar="N", help="sequences at a time; 1 if left out")
    help_ = "tokens per sequence; the model's positions if left out"
    add("--context", type=integer, metavar="N", help=help_)
    help_ = "tokens of the prompt, part of --context; all of it if left out"
    add("--prompt", type=integer, metavar="N", help=help_)
    help_ = "tokens per draft; 5 if left out"
    add("--draft-length", type=integer, default=5, metavar="N", help=help_)
    help_ = "memory of the device, such as 80GB or 16GiB: also print the most that fits"
    add("--device", type=_size, metavar="SIZE", help=help_)


def _add_speed(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_ = "probability that a drafted token is accepted, 0 … 1; A,B for two levels"
    add("--acceptance", type=_numbers, metavar="A", help=help_)
    help_ = "time of a draft pass over that of a target pass; C,D for two levels"
    add("--draft-cost", type=_numbers, metavar="C", help=help_)
    help_ = "time that a drafted token adds to the verifying pass, in target passes; 0 if left out"
    add("--row-cost", type=float, default=0.0, metavar="C", help=help_)
    _add_longest(parser)
    add("--measure", action="store_true", help="measure acceptance and costs on this machine")
    help_ = "prompts to measure with: JSON lines, or one text per line"
    add("--prompts", type=Path, metavar="FILE", help=help_)
    help_ = "prompts of the file, the first ones; all if left out"
    add("--limit", type=at_least(1), metavar="N", help=help_)
    add("--rows", type=integer, default=1, metavar="N", help="prompts at a time; 1 if left out")
    help_ = "most tokens per prompt; 64 if left out"
    add("--max-new-tokens", type=integer, default=64, metavar="N", help=help_)
    add_model(parser)
    add_quantize(parser)
    add_drafter(parser)


def _add_layers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("text", type=Path, help="a file of calibration text")
    add_model(parser)
    add_quantize(parser)
    help_ = "activation precision of the draft; a16 if left out"
    add("--draft-activation", choices=ACTIVATIONS, default="a16", help=help_)
    help_ = "sequences taken from the text; 4 if left out"
    add("--sequences", type=integer, default=4, metavar="N", help=help_)
    add("--length", type=integer, default=256, metavar="N", help="tokens of each; 256 if left out")
    _add_longest(parser)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_quantize(parser)
    add_cache_bits(parser)
    help_ = "batch size; repeatable; 1 and 8 if left out"
    parser.add_argument("--rows", type=integer, action="append", metavar="N", help=help_)
    help_ = "tokens of a prompt; 128 if left out"
    parser.add_argument("--prompt", type=integer, default=128, metavar="N", help=help_)


def _add_longest(parser: argparse.ArgumentParser) -> None:
    help_ = f"most tokens per draft to consider; {LONGEST} if left out"
    parser.add_argument("--longest", type=integer, default=LONGEST, metavar="N", help=help_)


def _memory(options: argparse.Namespace) -> None:
    check_picture(options.picture)
    config, weights = read_config(options.model)
    draft_config, draft = None, None
    if options.draft is not None:
        draft_config, draft = read_config(options.draft)
    context = config.max_position_embeddings if options.context is None else options.context

    plan = partial(
        planning.plan_memory, config, options.weights or weights,
        draft=options.draft_weights or draft, draft_config=draft_config,
        share_cache=options.share_cache, group_size=options.group_size,
        lm_head=options.draft_lm_head, prompt=options.prompt, cache_bits=options.cache_bits,
        draft_length=options.draft_length,
    )  # fmt: skip
    found = plan(rows=options.rows, context=context)
    numbers: dict[str, Any] = dataclasses.asdict(found) | {"total": found.total}
    device = options.device
    if device is not None:
        held = found.target + found.draft
        if held > device:
            raise ValueError(
                f"--device must hold at least the weights, {in_units(held)}, got {in_units(device)}"
            )
        numbers["device"] = device
        numbers["most rows"] = most_that_fits(
            device, lambda n: plan(rows=n, context=context).total, MOST_ROWS
        )
        numbers["longest context"] = most_that_fits(
            device,
            lambda n: plan(rows=options.rows, context=n).total,
            config.max_position_embeddings,
        )
    _print_table(["", "bytes"], [[name, _shown(name, n)] for name, n in numbers.items()])
    if device is not None and found.total > device:
        print(f"\nDoes not fit: {options.rows} rows of {context} tokens")
    write_json(options.json, numbers)
    if options.picture is not None:
        draw_memory(found, device, options.picture)


def _speed(options: argparse.Namespace) -> None:
    check_picture(options.picture)
    if options.measure:
        levels, draft_cost = _measured(options)
    else:
        levels, draft_cost = _given(options)
    rows = _best_by_length(levels, draft_cost, options.longest)
    best = max(rows, key=lambda row: row["speed-up"])
    header = ["draft length", "below it", "tokens per round", "speed-up"]
    _print_table(header, [[_number(row[name]) for name in header] for row in rows])
    print(f"\nbest: {best['draft length']} drafts, {best['speed-up']:.2f} times plain decoding")
    if best["speed-up"] < 1:
        print("Drafting does not pay: decode with --drafter autoregressive")
    numbers = {"levels": [dataclasses.asdict(level) for level in levels], "draft cost": draft_cost}
    write_json(options.json, numbers | {"lengths": rows})
    if options.picture is not None:
        draw_speed(levels, draft_cost, rows, options.picture)


def _given(options: argparse.Namespace) -> tuple[tuple[Level, ...], float]:
    """The levels that the options describe."""
    shares, costs = options.acceptance, options.draft_cost
    if shares is None or costs is None or len(shares) != len(costs):
        raise ValueError(
            "plan speed needs --acceptance and --draft-cost, a number each per level, or --measure"
        )
    passes = (1.0, *costs[:-1])
    levels = tuple(
        Level(share, 1, cost, options.row_cost * cost)
        for share, cost in zip(shares, passes, strict=True)
    )
    return levels, costs[-1]


def _measured(options: argparse.Namespace) -> tuple[tuple[Level, ...], float]:
    """Acceptance and costs of the drafter that the options name."""
    if options.prompts is None:
        raise ValueError("--measure needs --prompts, a file of prompts")
    texts = read_prompts(options.prompts, options.limit)
    target = chosen_target(options)
    chosen = read_drafter(options)
    drafter = make_drafter(chosen._replace(drafter=chosen.drafter or "qspec"), target)
    tokenizer = specjax.load_tokenizer(options.model)
    found = planning.measure(
        target.params, drafter, [tokenizer.encode(text) for text in texts], rows=options.rows,
        max_new_tokens=options.max_new_tokens,
    )  # fmt: skip
    schedule = found.adaptive()
    print(
        f"one plain pass: {1e3 * found.seconds:.2f} ms; measured at {drafter.draft_length} drafts:"
    )
    print(f"{found.tokens_per_round:.2f} tokens per round, speed-up {found.speedup:.2f}")
    for level in found.levels:
        costs = ", ".join(f"{cost:.2f}" for cost in level.measured)
        print(f"acceptance {level.acceptance:.3f}; verifying 0, 1, … drafts costs {costs}")
    print(f"one draft of the last drafter costs {found.draft_cost:.3f}")
    print(f"Adaptive(draft_cost={schedule.draft_cost:.3f}, row_cost={schedule.row_cost:.3f})\n")
    return found.levels, found.draft_cost


def _best_by_length(
    levels: Sequence[Level], draft_cost: float, longest: int
) -> list[dict[str, Any]]:
    """For each draft length of the first drafter the best of those below it, and what they give."""
    target, *inner = levels
    rows = []
    lengths = range(1, check_longest(longest) + 1)
    fastest = fastest_for_each(lengths, inner, draft_cost, longest)
    for n, below in zip(lengths, fastest, strict=True):
        first = dataclasses.replace(target, draft_length=n)
        rows.append(
            {
                "draft length": n,
                "below it": "+".join(str(level.draft_length) for level in below),
                "tokens per round": planning.expected_tokens(first.acceptance, n),
                "speed-up": planning.speedup((first, *below), draft_cost),
            }
        )
    return rows


def _layers(options: argparse.Namespace) -> None:
    check_picture(options.picture)
    text = read_text(options.text)
    params = chosen_target(options).params
    tokenizer = specjax.load_tokenizer(options.model)
    tokens = specjax.calibration_tokens(
        text, tokenizer, sequences=options.sequences, length=options.length
    )
    with progress_bar("layer") as progress:
        found = planning.search_layers(
            params, tokens, activation=options.draft_activation, longest=options.longest,
            progress=progress,
        )  # fmt: skip
    rows = [dataclasses.asdict(each) for each in sorted(found, key=lambda each: len(each.layers))]
    _print_table(list(rows[0]), [[_number(value) for value in row.values()] for row in rows])
    best = found[0]
    if best.speedup < 1:
        print("\nSkipping layers of this model does not pay")
    else:
        chosen = ",".join(map(str, best.layers))
        print(f"\nbest: --drafter layer-skip --layers {chosen} --draft-length {best.draft_length}")
    write_json(options.json, {"sets": rows})
    if options.picture is not None:
        draw_layers(found, options.picture)


def _calibrate(options: argparse.Namespace) -> None:
    """Prints a row per batch size: passes over 0, 1, 3 and 7 drafts, a pass that drafts, a look."""
    sizes = options.rows or [1, 8]
    if min(sizes) < 1:
        raise ValueError(f"--rows must be at least 1, got {min(sizes)}")
    if options.prompt < 1:
        raise ValueError(f"--prompt must be at least 1, got {options.prompt}")
    params = chosen_target(options).params
    found = [(rows, calibrate(params, rows, options.cache_bits, options.prompt)) for rows in sizes]
    rows = [
        {
            "rows": rows, "passes": costs.passes.tolist(), "draft": float(costs.draft),
            "look": float(costs.look),
        }
        for rows, costs in found
    ]  # fmt: skip
    header = ["rows", *(f"{width} drafts" for width in WIDTHS), "draft pass", "look for drafts"]
    _print_table(header, [
        [_number(value) for value in (row["rows"], *row["passes"], row["draft"], row["look"])]
        for row in rows
    ])  # fmt: skip
    print("\nTimes in plain passes. Kept for this model, context and machine.")
    write_json(options.json, {"costs": rows})


def _size(text: str) -> int:
    """Bytes, with a unit or without."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
    if found is None or found[2] not in UNITS or len(found[1]) > _DIGITS:
        units = ", ".join(unit for unit in UNITS if unit)
        raise argparse.ArgumentTypeError(f"must be bytes or a number with {units}, got {text!r}")
    return int(float(found[1]) * UNITS[found[2]])


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"must be numbers with commas between them, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _shown(name: str, number: int) -> str:
    """A number of the memory table: counts as they are, the others in bytes."""
    return str(number) if name in COUNTS else in_units(number)


def _number(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns, aligned on the right but for the first."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        others = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join((line[0].ljust(widths[0]), *others)).rstrip())
