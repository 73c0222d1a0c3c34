"""The tests' process: the tests see a program's names, and the objects behind them live elsewhere.

The tests come with the task and are trusted. All that they receive of the program are copies of
plain values, whose comparison is Python's own, and stand-ins that equal nothing.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from typing import Any

from .messages import pack, receive, send, unpack

_LONGEST_REASON = 300


class _Lost(BaseException):
    """The program's process has ended, or does not answer as it should; tests do not catch this."""


class _Program:
    """The program's process, as the tests' process asks it."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self.lost = ""

    def ask(self, *request: object, arguments: tuple[Any, ...] = ()) -> Any:
        """The answer to a request; lists, dicts and sets among the arguments change as they did."""
        try:
            send(self._requests, request)
            kind, *details = receive(self._replies)
            if kind == "error":
                error = _error(*details)
            else:
                value, changed = details
                result = unpack(value, self._object)
                _bring_up_to_date(arguments, [unpack(each, self._object) for each in changed])
                return result
        except (EOFError, OSError):
            self.lost = "stopped: it exited by itself, or took too much processor time"
        except Exception as problem:
            self.lost = f"stopped: it gave a value that cannot be read ({type(problem).__name__})"
        if self.lost:
            raise _Lost
        raise error

    def _object(self, ticket: object) -> _Object:
        if not isinstance(ticket, int):
            raise ValueError("a ticket is not a number")
        return _Object(self, ticket)


class _Object:
    """An object of the program, by its name or its ticket."""

    __slots__ = ("_program", "_ticket")
    _program: _Program
    _ticket: int | str

    def __init__(self, program: _Program, ticket: int | str) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_ticket", ticket)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        packed = [pack(each, _ticket) for each in arguments]
        packed_names = {name: pack(each, _ticket) for name, each in named.items()}
        return self._program.ask("call", self._ticket, packed, packed_names, arguments=arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, such as copy's
            raise AttributeError(name)
        return self._program.ask("get", self._ticket, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._program.ask("set", self._ticket, name, pack(value, _ticket))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.ask("iterate", self._ticket))

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


def judge(tests: bytes, requests: int, replies: int) -> str | None:
    """Runs the tests of a program.

    Args:
      tests: JSON of an object: `given`, source that runs first; `names` of the program that the
        tests use; `tests`, their source.
      requests, replies: pipes to and from the program's process.

    Returns:
      None where the tests pass; else why not.
    """
    program = _Program(requests, replies)
    try:
        parts = json.loads(tests)
        program.ask("ready")  # it dies with the keeper from then on, and not a moment later
        program.ask("run")
        namespace: dict[str, object] = {"__name__": "tests"}
        exec(compile(parts["given"], "given.py", "exec"), namespace)
        namespace.update((name, _Object(program, name)) for name in parts["names"])
        exec(compile(parts["tests"], "tests.py", "exec"), namespace)
    except _Lost:
        pass
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
    return program.lost or None


def _ticket(value: object) -> int | str:
    if isinstance(value, _Object):
        return value._ticket
    raise TypeError(f"the tests pass a {type(value).__name__}, which a program cannot receive")


def _error(name: str, text: str) -> Exception:
    """The program's exception, of Python's own kind where it has one of this name.

    The end of an iteration does not count as one: it would end a loop of the tests without an
    error.
    """
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        kind = Exception
    if issubclass(kind, StopIteration | StopAsyncIteration):
        kind = Exception
    derived: type[Exception] = type(name, (kind,), {"__str__": lambda self: text})
    return derived.__new__(derived)  # some kinds want arguments


def _bring_up_to_date(arguments: tuple[Any, ...], changed: list[Any]) -> None:
    for old, new in zip(arguments, changed, strict=False):
        if isinstance(old, list) and isinstance(new, list):
            old[:] = new
        elif isinstance(old, dict | set) and isinstance(new, type(old)):
            old.clear()
            old.update(new)
