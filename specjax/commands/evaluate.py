"""`specjax evaluate`: perplexity, and how alike two activation precisions are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import specjax
from specjax.commands.files import check_picture, pyplot, read_prompts, write_json
from specjax.commands.options import add_cache_bits, add_model
from specjax.evaluation import Fidelity, fidelity, perplexity


def add(commands: Any) -> None:
    """Adds the command and its two kinds of evaluation to a parser's commands."""
    parser = commands.add_parser("evaluate", help="perplexity, fidelity of low precision")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    _add_perplexity(kinds.add_parser("perplexity", help="of a text, in sliding windows"))
    _add_fidelity(
        kinds.add_parser("fidelity", help="top-1 probabilities under two activation precisions")
    )


def _add_common(parser: argparse.ArgumentParser, activation: str) -> None:
    add_model(parser)
    add = parser.add_argument
    add("--activation", choices=("a16", "a8", "a4"), default=activation)
    add("--rows", type=int, default=1, help="texts per pass")
    add("--json", type=Path, help="write the numbers to this file")


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, "a16")
    add = parser.add_argument
    add("text", type=Path, help="a text file, such as WikiText-2's")
    add("--window", type=int, default=512, help="tokens per window")
    add("--stride", type=int, help="tokens between windows; as wide as they are if left out")
    add_cache_bits(parser)
    add("--max-tokens", type=int, help="only the first tokens of the text")
    parser.set_defaults(run=_perplexity)


def _add_fidelity(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, "a4")
    add = parser.add_argument
    add("prompts", type=Path, help="a file of prompts: JSON lines, or one text per line")
    add("--limit", type=int, help="only the first prompts of the file")
    add("--max-new-tokens", type=int, default=128, help="tokens written after each prompt")
    add("--picture", type=Path, help="draw the scatter (QSpec figure 2) into this file")
    parser.set_defaults(run=_fidelity)


def _perplexity(options: argparse.Namespace) -> None:
    params = specjax.load(options.model)
    text = options.text.read_text(encoding="utf-8")
    tokens = specjax.load_tokenizer(options.model).encode(text)[: options.max_tokens]
    with tqdm(unit="pass", leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

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
        del numbers["bits per byte"]  # the bytes of a part of the text are not known
    _report(numbers, options.json)


def _fidelity(options: argparse.Namespace) -> None:
    check_picture(options.picture)
    params = specjax.load(options.model)
    tokenizer = specjax.load_tokenizer(options.model)
    prompts = [tokenizer.encode(text) for text in read_prompts(options.prompts)[: options.limit]]
    result = fidelity(
        params, prompts, activation=options.activation, max_new_tokens=options.max_new_tokens,
        rows=options.rows,
    )  # fmt: skip
    _report(result.summary(), options.json)
    if options.picture is not None:
        _draw(result, options.activation, options.picture)


def _report(numbers: dict[str, float], target: Path | None) -> None:
    for name, value in numbers.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    write_json(target, numbers)


def _draw(result: Fidelity, activation: str, target: Path) -> None:
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(5, 5))
    for accepted, colour, label in (
        (True, "tab:green", "accepted"),
        (False, "tab:red", "rejected"),
    ):
        chosen = result.accepted == accepted
        label = f"{label} ({chosen.mean():.1%})"
        axes.scatter(
            result.precise[chosen], result.drafted[chosen], s=4, alpha=0.4, c=colour, label=label
        )
    axes.set(xlabel="probability under a16", ylabel=f"probability under {activation}")
    axes.legend(loc="upper left")
    figure.savefig(target, dpi=120, bbox_inches="tight")
    plot.close(figure)
