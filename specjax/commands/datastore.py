"""`specjax datastore`: a corpus to draft from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import specjax
from specjax.commands.options import add_model, add_output, integer
from specjax.drafting.datastore import check_target
from specjax.evaluation.corpus import build_datastore
from specjax.evaluation.progress_bar import progress_bar


def add(commands: Any) -> None:
    """Adds the command."""
    help_ = "build a corpus to draft from"
    parser = commands.add_parser("datastore", help=help_, description=help_)
    kinds = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    help_ = "score a corpus and keep the texts of the lowest perplexity"
    build = kinds.add_parser("build", help=help_, description=help_)
    add = build.add_argument
    add("corpus", type=Path, help="a text file or JSON lines, also gzipped")
    help_ = "the directory of the datastore"
    add_output(build, "out", directory=True, check=check_target, help=help_)
    add_model(build)
    for name, default, what in (
        ("--keep", 100_000, "sequences to keep"),
        ("--length", 256, "tokens per sequence"),
        ("--rows", 8, "sequences per pass"),
    ):
        add(name, type=integer, default=default, metavar="N", help=f"{what}; {default} if left out")
    add("--no-refine", action="store_true", help="keep the first sequences, without scoring any")
    build.set_defaults(run=_build)


def _build(options: argparse.Namespace) -> None:
    params = specjax.load(options.model)
    tokenizer = specjax.load_tokenizer(options.model)
    with progress_bar("sequence") as progress:
        store = build_datastore(
            params, tokenizer, options.corpus, options.out, keep=options.keep,
            refine=not options.no_refine, length=options.length, rows=options.rows,
            progress=progress,
        )  # fmt: skip
    print(f"{options.out}: {store.suffixes.shape[0]} tokens")
