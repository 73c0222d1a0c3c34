"""Small JSON schemas: nested objects, choices, arrays, numbers and text beyond ASCII."""

from __future__ import annotations

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


_WORD = {"type": "string", "maxLength": 6}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

SCHEMAS: dict[str, dict[str, Any]] = {
    "an object": _object(name=_WORD, size=_DIGIT),
    "nested": _object(outer=_object(inner=_object(flag={"type": "boolean"}))),
    "choices": _object(colour={"enum": ["red", "green", "blue"]}, on={"type": "boolean"}),
    "unicode": _object(città={"enum": ["Zürich", "東京", "São Paulo", "🙂"]}, näme=_WORD),
    "an array": {"type": "array", "items": _DIGIT, "minItems": 2, "maxItems": 4},
    "a number": {"type": "number", "minimum": -10, "maximum": 10},
    "an integer": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "a constant": {"const": {"kind": "ready", "list": [1, None, True]}},
    "either": {"anyOf": [_object(a=_DIGIT), _object(b={"type": "boolean"})]},
    "null or text": {"type": ["string", "null"], "maxLength": 5},
    "a call": _object(
        name={"const": "get_weather"},
        arguments=_object(city=_WORD, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    "calls": {
        "type": "array", "minItems": 1, "maxItems": 2,
        "items": _object(tool={"enum": ["add", "multiply"]}, x=_DIGIT, y=_DIGIT),
    },
    "optional": {
        "type": "object", "properties": {"a": _DIGIT, "b": _DIGIT, "c": _DIGIT},
        "required": ["b"], "additionalProperties": False,
    },
    "a pattern": _object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "a date": _object(day={"type": "string", "format": "date"}),
    "a pair": {
        "type": "array", "prefixItems": [_DIGIT, {"type": "boolean"}], "items": False,
        "minItems": 2,
    },
    "a reference": {
        "$defs": {"point": _object(x=_DIGIT, y=_DIGIT)},
        **_object(begin={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "an array of objects": {"type": "array", "items": _object(id=_DIGIT), "maxItems": 3},
    "mixed choices": {"enum": ["yes", 0, None, [1, 2], {"é": "è"}]},
    "exclusive bounds": _object(
        share={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    ),
}  # fmt: skip
