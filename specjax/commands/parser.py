"""The parser of all commands, and the run of the one that the arguments name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import specjax
from specjax.commands import (
    bench,
    chat,
    checkpoints,
    datastore,
    evaluate,
    generate,
    lm_eval,
    plan,
    serve,
)
from specjax.commands.options import Parser, check_outputs


def run_command(arguments: Sequence[str] | None) -> None:
    """Runs one command; None: that of this process.

    Raises:
      ValueError: the command refuses, in one sentence.
      OSError: a file cannot be read or written.
    """
    options = _parser().parse_args(arguments)
    check_outputs(options)
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    more = "specjax COMMAND --help lists a command's options."
    parser = Parser(prog="specjax", description=specjax.__doc__, epilog=more)
    parser.add_argument("--version", action="version", version=f"specjax {specjax.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for each in (generate, chat, serve, checkpoints, evaluate, lm_eval, bench, plan, datastore):
        each.add(commands)
    return parser
