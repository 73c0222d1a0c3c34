"""Damaged and hostile variants of valid files, as hypothesis strategies."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

ESCAPE = "\x1b]0;title\x07\x1b[31m\u202e"
_RAW = {  # placeholders for texts that `json.dumps` cannot write
    "@deep@": "[" * 100_000 + "]" * 100_000,
    "@deep object@": '{"a":' * 2000 + "1" + "}" * 2000,
    "@infinite@": "1e999",
    "@digits@": "9" * 5000,
    "@twice@": '{"a": 1, "a": {"a": []}}',
}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 63, 64, 65, 255, 256, 1.5, 1e-40, 1e39, -0.0,
    float("nan"), float("inf"), 10_000, 10**6, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**400,
    "", " ", "a", "1", "false", "true", "null", "NaN", ESCAPE, "\0", "\ud800", "é", "a" * 100_000,
    "..", "../config.json", "/etc/passwd", "a/b", "C:\\a", "re:(a*)*b", "re:[",
    "re:" + ".?" * 60 + "!", "{", "{{ 1/0 }}",
    [], {}, [[]], [None], [0], ["a"], [1, 1], {"a": 1}, {"": None}, {ESCAPE: ESCAPE}, [[[[]]]],
    list(range(1000)), *_RAW,
)  # fmt: skip


@st.composite
def changed_json(draw: st.DrawFn, valid: Any) -> bytes:
    """JSON of a valid value with some parts replaced, removed, duplicated or exchanged."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        value = _changed(draw, value)
    text = json.dumps(value)
    for name, raw in _RAW.items():
        text = text.replace(json.dumps(name), raw)
    data = text.encode("utf-8", "surrogatepass")
    return draw(changed_bytes(data)) if draw(st.integers(0, 9)) == 0 else data


def _changed(draw: st.DrawFn, value: Any) -> Any:
    places = list(_places(value))
    if not places:
        return _value(draw)
    inside, key = draw(st.sampled_from(places))
    other, other_key = draw(st.sampled_from(places))
    edit = draw(st.sampled_from(("replace",) * 4 + ("remove", "exchange", "add", "rename")))
    if edit == "replace":
        inside[key] = _value(draw)
    elif edit == "remove":
        del inside[key]
    elif edit == "exchange":
        inside[key] = copy.deepcopy(other[other_key])
    elif isinstance(inside, dict):
        name = draw(st.sampled_from((ESCAPE, "", str(other_key), "more")))
        inside[name] = inside.pop(key) if edit == "rename" else _value(draw)
    else:
        inside.insert(key, copy.deepcopy(inside[key]))
    return value


def _value(draw: st.DrawFn) -> Any:
    return copy.deepcopy(draw(st.sampled_from(VALUES)))  # later edits may change it


def _places(value: Any) -> Any:
    """Every place in a value: the object or list, and the key or index."""
    if not isinstance(value, dict | list):
        return
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        yield from _places(inner)


@st.composite
def changed_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid contents, cut, overwritten, or with a piece removed, duplicated or inserted."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        # Half of the damage is at the beginning, where formats have their headers.
        end = draw(st.sampled_from((len(data), min(len(data), 200))))
        begin = draw(st.integers(0, end))
        size = draw(st.sampled_from((0, 1, 1, 2, 4, 8, 50)))
        piece = draw(
            st.one_of(
                st.binary(max_size=8),
                st.sampled_from((b"", b"\xff" * 8, b"\0" * 8, b"9" * 30, ESCAPE.encode(), b"]")),
                st.just(bytes(data[begin : begin + size]) * 2),
            )
        )
        if draw(st.integers(0, 9)) == 0:
            del data[begin:]
        data[begin : begin + size] = piece
    return bytes(data)
