"""Programs that one thread compiles while another runs others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax


class Ahead:
    """Programs that are compiled before they are needed; the others compile where they run."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._ended = False

    def end(self) -> None:
        """Has the thread that compiles end with the program that it is compiling."""
        self._ended = True

    def compile(self, program: Any, *args: Any, **static: Hashable) -> Any:
        """Compiles a program that `jax.jit` made, for arguments like these. Returns the shapes of
        its results.

        args: the arguments, or `jax.ShapeDtypeStruct`s of their arrays.
        static: the static arguments, by name.

        Raises RuntimeError after `end`.
        """
        if self._ended:
            raise RuntimeError("no more programs are compiled ahead")
        lowered = program.lower(*args, **static)
        self._compiled[_name(program, args, static)] = lowered.compile()
        return lowered.out_info

    def run(self, program: Any, *args: Any, **static: Hashable) -> Any:
        """Runs a program on arguments."""
        compiled = self._compiled and self._compiled.get(_name(program, args, static))
        return compiled(*args) if compiled else program(*args, **static)


def _name(program: Any, args: tuple[Any, ...], static: dict[str, Hashable]) -> Hashable:
    """Tells programs apart. The first argument, the model, is always the same."""
    return program, jax.tree.structure(args[1:]), tuple(sorted(static.items()))
