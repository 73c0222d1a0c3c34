"""A thread that compiles programs of rounds while the engine runs others."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from specjax.generation.kinds import Scope

_log = logging.getLogger(__name__)


class Compiler:
    """Compiles the programs of scopes one after another, each once.

    compile: compiles those of a scope.
    told: hears, in the thread, of every scope, with the error if it could not be compiled.
    """

    def __init__(
        self, compile: Callable[[Scope], None], told: Callable[[Scope, Exception | None], None]
    ) -> None:
        self._compile, self._told = compile, told
        self._asked, self._open, self._ended = set[Scope](), set[Scope](), False
        self._queue: queue.SimpleQueue[Scope | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="specjax-compiler", daemon=True)

    @property
    def open(self) -> int:
        """Scopes whose programs somebody asked for, and that are not compiled yet."""
        return len(self._open)

    def ask(self, scope: Scope) -> None:
        """Asks for a scope's programs, unless somebody has."""
        if scope not in self._asked:
            self._asked.add(scope)
            self._open.add(scope)
            self._queue.put(scope)

    def ask_again(self, scope: Scope) -> None:
        """Asks for a scope's programs that could not be compiled before."""
        self._asked.discard(scope)
        self.ask(scope)

    def start(self) -> None:
        """Begins to compile."""
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, with the program that it is compiling."""
        self._ended = True
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        for scope in iter(self._queue.get, None):
            error = None
            try:
                self._compile(scope)
            except Exception as raised:
                error = raised
            if self._ended:
                return
            if error is not None:
                _log.error("the programs of %s cannot be compiled", scope, exc_info=error)
            self._told(scope, error)
            self._open.discard(scope)
