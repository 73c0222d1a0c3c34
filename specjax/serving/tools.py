"""Calls of tools, as Hermes, Qwen and many others write them: a JSON object between two tags.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

A call is asked for by a grammar, and found in the text of an answer. An answer whose end is not
wholly of this form, or that names a tool which nobody offered, stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.files.json_objects import refuse_constant
from specjax.generation.constraints import SEPARATORS
from specjax.generation.text import ToolTokenizer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TOLD = re.compile(_OPEN + r"""\s*\{\s*["'](name|arguments)["']""")
_PROBE = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
}


class Call(NamedTuple):
    """A call. arguments: a JSON object."""

    name: str
    arguments: str


def writes_calls(tokenizer: ToolTokenizer) -> bool:
    """Whether the chat template tells the model to write calls in this form, and the tokenizer
    shows both tags in a text."""
    try:
        told = tokenizer.chat([{"role": "user", "content": "A"}], tools=[_PROBE])
        tags = tokenizer.decode(tokenizer.encode(_OPEN + _CLOSE, special_tokens=False))
    except ValueError:
        return False
    return _OPEN in tags and _CLOSE in tags and _TOLD.search(told) is not None


def call_grammar(functions: Sequence[Mapping[str, Any]]) -> str:
    """The grammar, as `Constraint.lark` takes it, of a text that calls one of some functions.

    functions: each with its name, and the JSON schema of its arguments as `parameters`.
    """
    rules, calls, end = list[str](), list[str](), json.dumps(f"}}\n{_CLOSE}")
    for number, function in enumerate(functions):
        begin = json.dumps(f'{_OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        calls.append(f"call_{number}")
        rules.append(f"call_{number}: {begin} arguments_{number} {end}")
        rules.append(f"arguments_{number}: %json {json.dumps(_schema(function))}")
    return "\n".join([f"start: {' | '.join(calls)}", *rules])


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; without parameters there are none."""
    given = function.get("parameters")
    schema = {"additionalProperties": False} if given is None else given
    return {"type": "object", **schema, "x-guidance": SEPARATORS}


def split_calls(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """Returns the text before the calls at its end, and the calls; all of it where there are none.

    names: the functions that may be called.
    """
    before, _, _ = text.partition(_OPEN)
    place, calls = len(before), list[Call]()
    while place < len(text):
        found = _read_call(text, place, names)
        if found is None:
            return text, []
        call, place = found
        calls.append(call)
    return (before.rstrip(), calls) if calls else (text, [])


def _read_call(text: str, place: int, names: Collection[str]) -> tuple[Call, int] | None:
    """The call at a place of a text, and the place behind it; None if there is none."""
    if not text.startswith(_OPEN, place):
        return None
    try:
        value, end = _DECODER.raw_decode(text, _after_space(text, place + len(_OPEN)))
        end = _after_space(text, end)
        if not text.startswith(_CLOSE, end) or not _is_call(value, names):
            return None
        arguments = json.dumps(value["arguments"], ensure_ascii=False, allow_nan=False)
        arguments.encode()  # half of a pair of surrogates is not text
    except (ValueError, RecursionError):
        return None
    return Call(value["name"], arguments), _after_space(text, end + len(_CLOSE))


def _after_space(text: str, place: int) -> int:
    return len(text) - len(text[place:].lstrip())


def _is_call(value: Any, names: Collection[str]) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "arguments"}
        and isinstance(value["name"], str)
        and value["name"] in names
        and isinstance(value["arguments"], dict)
    )


_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


class CallStream:
    """Shows a text as it comes, and holds back what may be a call. names: as in `split_calls`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = names, ""

    def push(self, text: str) -> str:
        """Returns the text that is not in a call, whatever follows."""
        self._held += text
        begun = self._held.find(_OPEN)
        if begun < 0:
            lengths = range(len(_OPEN) - 1, -1, -1)
            begun = len(self._held) - next(n for n in lengths if self._held.endswith(_OPEN[:n]))
        shown = self._held[:begun].rstrip()
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> tuple[str, list[Call]]:
        """Returns the text that was held back, and the calls."""
        return split_calls(self._held, self._names)
