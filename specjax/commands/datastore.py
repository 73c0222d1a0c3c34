"""`specjax datastore`: a corpus to draft from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

import specjax
from specjax.commands.options import add_model
from specjax.evaluation.corpus import build_datastore


def add(commands: Any) -> None:
    """Adds the command to a parser's."""
    parser = commands.add_parser("datastore", help="a corpus to look drafts up in")
    kinds = parser.add_subparsers(required=True, metavar="ACTION")
    build = kinds.add_parser("build", help="score a corpus and keep what the model expects best")
    add = build.add_argument
    add("corpus", type=Path, help="a text file or JSON lines, perhaps gzipped")
    add("out", type=Path, help="the datastore: a directory")
    add_model(build)
    add("--keep", type=int, default=100_000, help="sequences to keep")
    add("--no-refine", action="store_true", help="keep the first ones instead of the best")
    add("--length", type=int, default=256, help="tokens per sequence")
    add("--rows", type=int, default=8, help="sequences per pass")
    build.set_defaults(run=_build)


def _build(options: argparse.Namespace) -> None:
    params = specjax.load(options.model)
    tokenizer = specjax.load_tokenizer(options.model)
    with tqdm(unit="sequence", leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        store = build_datastore(
            params, tokenizer, options.corpus, options.out, keep=options.keep,
            refine=not options.no_refine, length=options.length, rows=options.rows,
            progress=progress,
        )  # fmt: skip
    print(f"{options.out}: {store.suffixes.shape[0]} tokens")
