"""The parser of all commands, and the run of the one that the arguments name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import jax

import specjax
from specjax.commands import checkpoints, datastore, evaluate, generate, lm_eval, plan
from specjax.commands.options import Parser, check_outputs


def run_command(arguments: Sequence[str] | None) -> None:
    """Runs one command; None: that of this process.

    Raises:
      ValueError: the command refuses, in one sentence.
      OSError: a file cannot be read or written.
    """
    options = _parser().parse_args(arguments)
    check_outputs(options)
    _enable_compilation_cache()
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    more = "specjax COMMAND --help lists a command's options."
    parser = Parser(prog="specjax", description=specjax.__doc__, epilog=more)
    parser.add_argument("--version", action="version", version=f"specjax {specjax.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for each in (generate, checkpoints, evaluate, lm_eval, plan, datastore):
        each.add(commands)
    return parser


def _enable_compilation_cache() -> None:
    """Keeps compiled programs on disk, where the next command finds them."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for name, value in (
        ("jax_compilation_cache_dir", str(Path(base) / "specjax" / "compiled")),
        ("jax_persistent_cache_min_compile_time_secs", 0.5),
    ):
        jax.config.update(name, value)
