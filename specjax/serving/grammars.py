"""The grammar that a request's outputs keep to."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.checks import printable
from specjax.generation.constraints import Constraint, Guide, TokenBytes
from specjax.generation.text import ChatTokenizer
from specjax.model.params import Params
from specjax.serving.engine import Engine
from specjax.serving.errors import Refused
from specjax.serving.requests import Common
from specjax.serving.tools import call_grammar

_FIELDS = "response_format", "guided_regex", "guided_grammar"


def grammars_possible(params: Params) -> bool:
    """Whether outputs of a model can keep to grammars here."""
    return params.mesh is None and importlib.util.find_spec("llguidance") is not None


def open_guide(
    engine: Engine, tokenizer: ChatTokenizer, asked: Common, functions: Sequence[Mapping[str, Any]]
) -> Guide | None:
    """Returns the guide of a request's outputs, at their beginning; None where they are free.

    functions: those of which the outputs must call one; none where they need not.

    Raises Refused where there are two grammars, one is not valid, or none can be kept to.
    """
    given = [name for name in _FIELDS if getattr(asked, name) is not None]
    if functions:
        given.append("tool_choice")
    if given == ["response_format"] and asked.schema_asked() is None:
        return None
    if len(given) > 1:
        raise Refused(400, f"{' and '.join(given)} exclude each other", param=given[1])
    if not given:
        return None
    _check_possible(engine, given[0])
    try:
        constraint = _constraint(tokenizer, asked, functions)
        return constraint.guide(engine.params.config.vocab_size, engine.stop_tokens)
    except ValueError as error:
        raise Refused(400, printable(error, 500), param=given[0]) from None


def _constraint(
    tokenizer: ChatTokenizer, asked: Common, functions: Sequence[Mapping[str, Any]]
) -> Constraint:
    assert isinstance(tokenizer, TokenBytes)
    if functions:
        return Constraint.lark(call_grammar(functions), tokenizer)
    if asked.guided_regex is not None:
        return Constraint.regex(asked.guided_regex, tokenizer)
    if asked.guided_grammar is not None:
        return Constraint.lark(asked.guided_grammar, tokenizer)
    return Constraint.json_schema(asked.schema_asked() or {}, tokenizer)


def _check_possible(engine: Engine, field: str) -> None:
    """Raises Refused where the engine has no room for grammars."""
    if engine.params.mesh is not None:
        message = f"{field} needs a model on one device, and this one is divided over several"
        raise Refused(400, message, param=field)
    if not engine.constrained:
        message = f"{field} needs llguidance on the server: pip install 'specjax[structured]'"
        raise Refused(400, message, param=field)
