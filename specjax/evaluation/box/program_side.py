"""The program's process: it runs the program, then does with its objects what the tests ask.

The program can reach everything here, so the verdict is made elsewhere.
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

from .messages import pack, receive, send, unpack

_MOST_ITEMS = 100_000  # that tests may take from an iterator
_LONGEST_REASON = 300
_CHANGEABLE = (list, dict, set)


def serve(source: bytes, requests: int, replies: int) -> None:
    """Answers requests until the tests' process ends; one of them runs the program."""
    program = _Program(source)
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return
        try:
            reply = program.answer(*request)
        except BaseException as error:
            reply = ["error", type(error).__name__, _text(error)]
        try:
            send(replies, reply)
        except ValueError as error:
            send(replies, ["error", "ValueError", str(error)])


class _Program:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._module = types.ModuleType("__main__")
        self._kept: list[object] = []  # a ticket is a place in it

    def answer(self, what: str, *details: Any) -> list[object]:
        """Does what is asked. The reply holds the result, and what became of a call's arguments."""
        if what == "ready":
            return ["value", None, []]
        if what == "run":
            sys.modules["__main__"] = self._module
            code = compile(self._source.decode("utf-8", "surrogatepass"), "program.py", "exec")
            exec(code, self._module.__dict__)
            return ["value", None, []]
        target = self._object(details[0])
        if what == "call":
            return self._call(target, *details[1:])
        if what == "get":
            return ["value", self._packed(getattr(target, details[1])), []]
        if what == "set":
            setattr(target, details[1], unpack(details[2], self._object))
            return ["value", None, []]
        items = list(itertools.islice(target, _MOST_ITEMS + 1))
        if len(items) > _MOST_ITEMS:
            raise OverflowError(f"an iterator gave more than {_MOST_ITEMS} items")
        return ["value", self._packed(items), []]

    def _call(self, target: Any, packed: list[object], named: dict[str, object]) -> list[object]:
        arguments = [unpack(each, self._object) for each in packed]
        result = target(*arguments, **{k: unpack(v, self._object) for k, v in named.items()})
        changed = [
            self._packed(each) if isinstance(each, _CHANGEABLE) else None for each in arguments
        ]
        return ["value", self._packed(result), changed]

    def _packed(self, value: object) -> object:
        return pack(value, self._ticket)

    def _ticket(self, value: object) -> int:
        self._kept.append(value)
        return len(self._kept) - 1

    def _object(self, ticket: int | str) -> Any:
        if isinstance(ticket, int):
            return self._kept[ticket]
        if ticket not in self._module.__dict__:
            raise NameError(f"name {ticket!r} is not defined")
        return self._module.__dict__[ticket]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_REASON]
    except BaseException:
        return ""
