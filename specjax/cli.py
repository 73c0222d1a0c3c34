"""The command line: each command is a thin shell over a function that the library exports."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

import specjax
from specjax.commands import checkpoints, datastore, evaluate, generate, lm_eval, plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, or 1 after one sentence on what is wrong."""
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
    parser = argparse.ArgumentParser(prog="specjax", description=specjax.__doc__)
    parser.add_argument("--version", action="version", version=f"specjax {specjax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
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
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    sys.exit(main())
