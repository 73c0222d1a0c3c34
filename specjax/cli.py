"""The command line: each command is a thin shell over functions that the library exports."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

import specjax
from specjax.commands import checkpoints, datastore, evaluate, generate, lm_eval, plan
from specjax.commands.options import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, or 1 after one sentence about the error."""
    options = _parser().parse_args(arguments)
    _enable_compilation_cache()
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"specjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
