"""Answers that keep to a grammar, and prompts that tell of tools, over HTTP."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jax
import jsonschema
import pytest

import specjax
from benchmarks.support.schemas import SCHEMAS
from checkpoints_tools.chat.template import ChatTemplate
from checkpoints_tools.tokenizer import Tokenizer
from specjax.serving import grammars
from specjax.serving.requests import ChatRequest
from tests.serving.conftest import TEMPLATE
from tests.support.covering import left_out
from tests.support.live_server import Live, sampling_of

MESSAGES: list[Any] = [{"role": "user", "content": "Write of a balloon."}]
PLAIN = specjax.Autoregressive()
CHOSEN = ["an object", "choices", "unicode", "a call", "a reference"]


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def post(live: Live, change: dict[str, Any], path: str = "chat/completions") -> httpx.Response:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **change}
    return httpx.post(f"{live.url}/v1/{path}", json=body, timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.9},
        {"temperature": 0},
        {"temperature": 1.1, "presence_penalty": 0.8, "logit_bias": {"300": 3}},
    ],
)
def test_answers_keep_to_their_schemas_in_company(params, tokenizer, client, more) -> None:
    """Each has the bytes of `generate` alone, beside free answers and other schemas."""

    def ask(number: int) -> Any:
        own: dict[str, Any] = {}
        if number < len(CHOSEN):
            own["response_format"] = form(SCHEMAS[CHOSEN[number]])
        return client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=48, seed=number, **more, **own
        ).choices[0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(len(CHOSEN) + 2)))
    for number, choice in enumerate(found):
        own: dict[str, Any] = {}
        if number < len(CHOSEN):
            schema = SCHEMAS[CHOSEN[number]]
            own["constraint"] = specjax.Constraint.json_schema(schema, tokenizer)
            assert choice.finish_reason in ("stop", "length")
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content), schema)
        sampling = sampling_of(more)
        if sampling is not None:
            key = jax.random.fold_in(jax.random.key(number), 0)[None]
            own |= {"sampling": sampling, "key": key}
        [alone] = specjax.generate(
            params, tokenizer, [MESSAGES], max_new_tokens=48, drafter=PLAIN, **own
        )
        assert (choice.message.content, choice.finish_reason) == (alone.text, alone.finish)
    assert "stop" in [choice.finish_reason for choice in found[: len(CHOSEN)]]


@pytest.mark.exhaustive
def test_an_answer_that_is_cut_says_so(client) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content.startswith("{")
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ({"guided_regex": "(yes|no), [0-9]{2}"}, [f"{a}, {n:02}" for a in ("yes", "no")
                                                 for n in range(100)]),
        ({"guided_grammar": 'start: "up" | "down"'}, ["up", "down"]),
    ],
)  # fmt: skip
def test_texts_keep_to_expressions_and_grammars(client, grammar, texts) -> None:
    found = client.completions.create(
        model="tiny", prompt="A", max_tokens=20, n=3, seed=1, extra_body=grammar
    )  # fmt: skip
    assert all(choice.text in texts for choice in found.choices)
    assert {choice.finish_reason for choice in found.choices} == {"stop"}


DEEP: Any = {}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}
HOSTILE = [
    ({"response_format": form({"type": "nonsense"})}, "the JSON schema is refused"),
    ({"response_format": form({"$ref": "#/$defs/none"})}, "the JSON schema is refused"),
    ({"response_format": form({"$ref": "http://127.0.0.1:1/x"})}, "the JSON schema is refused"),
    ({"response_format": form({"not": {"type": "string"}})}, "the JSON schema is refused"),
    ({"response_format": form({"type": "string", "pattern": "(" * 50})}, "refused"),
    ({"response_format": form("{}")}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "json_schema goes with"),
    ({"response_format": {**form({}), "type": "text"}}, "json_schema goes with"),
    ({"response_format": {"type": "yaml"}}, "response_format.type must be"),
    ({"guided_regex": "(?=x)"}, "the regular expression is refused"),
    left_out(({"guided_regex": "((a{900}){900}){900}"}, "the grammar cannot be followed")),
    ({"guided_grammar": "begin: x"}, "the grammar is refused"),
    ({"guided_grammar": ""}, "a grammar must be a text that is not empty"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "exclude each other"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_hostile_grammars_get_one_clear_sentence(live, change, message) -> None:
    answer = post(live, change)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.exhaustive
def test_deep_and_greedy_schemas_end(live) -> None:
    """Each is refused or answered, and the server goes on."""
    for schema in (
        DEEP,
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "minItems": 10**9},
        {"enum": [str(n) * 20 for n in range(3000)]},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]},
    ):
        assert post(live, {"response_format": form(schema)}).status_code in (200, 400)
    assert post(live, {}).status_code == 200


def test_without_llguidance_a_grammar_is_refused(live, params, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not grammars.grammars_possible(params)
    monkeypatch.setattr(type(live.engine), "constrained", False)
    answer = post(live, {"response_format": {"type": "json_object"}})
    assert answer.status_code == 400
    assert "pip install 'specjax[structured]'" in answer.json()["error"]["message"]
    assert post(live, {"response_format": {"type": "text"}}).status_code == 200


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]


def test_a_template_that_takes_no_tools_is_not_told_of_any(live) -> None:
    answer = post(live, {"tools": TOOLS})
    assert answer.status_code == 400
    assert "the chat template takes no tools" in answer.json()["error"]["message"]
    assert post(live, {"tools": TOOLS, "tool_choice": "none"}).status_code == 200
    assert post(live, {"tools": []}).status_code == 200
    required = post(live, {"tools": TOOLS, "tool_choice": "required"})
    assert "tool_choice can ask for a call only where" in required.json()["error"]["message"]


def test_a_template_gets_the_tools_as_they_came(tokenizer) -> None:
    text = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + TEMPLATE
    told = Tokenizer(tokenizer._backend, None, ChatTemplate(text, {}, "a template with tools"))
    asked = ChatRequest(model="tiny", messages=MESSAGES, tools=TOOLS)
    shown = told.chat(asked.conversation(), tools=asked.tools_shown())
    assert shown == json.dumps(TOOLS[0]) + "\n" + told.chat(MESSAGES)
