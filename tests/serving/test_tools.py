"""Calls of tools: asked for, found in answers, and shown to the model again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from checkpoints_tools.chat.template import ChatTemplate
from checkpoints_tools.tokenizer import Tokenizer
from specjax.serving.requests import ChatRequest
from specjax.serving.tools import Call, CallStream, split_calls, writes_calls
from tests.serving.conftest import TEMPLATE, client_of, usual_server
from tests.support.live_server import Live

HERMES = (
    "{% if tools %}Call one so: <tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n'
    "{% for t in tools %}{{ t.function.name }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}assistant:"
)
ASKED: list[Any] = [{"role": "user", "content": "How warm is it?"}]
CITY: dict[str, Any] = {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9,
                                                              "minimum": 0}},
    "$defs": {"city": {"enum": ["Oslo", "Zürich"]}},
}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": 'stop "all"'}},
]
SCHEMAS = {"weather": CITY, 'stop "all"': {"const": {}}}
NAMES = {"f", "g"}
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TWO = '<tool_call>{"arguments": {"b": "</tool_call>"}, "name": "g"}</tool_call>'


@pytest.fixture(scope="module")
def told(tokenizer) -> Tokenizer:
    """The tests' tokenizer with a template that tells of calls."""
    return Tokenizer(tokenizer._backend, None, ChatTemplate(HERMES, {}, "a template with calls"))


@pytest.fixture(scope="module")
def live(params, told) -> Iterator[Live]:
    with usual_server(params, told) as live:
        yield live


@pytest.fixture(scope="module")
def client(live) -> Iterator[openai.OpenAI]:
    with client_of(live) as client:
        yield client


@pytest.mark.parametrize(
    ("text", "before", "calls"),
    [
        (ONE, "", [Call("f", '{"a": 1}')]),
        (
            f"Let me see.\n{ONE}\n{TWO}\n", "Let me see.",
            [Call("f", '{"a": 1}'), Call("g", '{"b": "</tool_call>"}')],
        ),
        ("No call.", "No call.", []),
        ("", "", []),
    ],
)  # fmt: skip
def test_calls_are_found_at_the_end_of_a_text(text, before, calls) -> None:
    assert split_calls(text, NAMES) == (before, calls)


def wrapped(body: str) -> str:
    return f"Yes <tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        f"{ONE} and more", f"{ONE}{ONE[:-1]}", "<tool_call>", "<tool_call></tool_call>",
        "<tool_call>" * 1000, wrapped("[]"), wrapped("1"), wrapped('{"name": "f"}'),
        wrapped('{"name": "h", "arguments": {}}'), wrapped('{"name": ["f"], "arguments": {}}'),
        wrapped('{"name": "f", "arguments": "{}"}'), wrapped('{"name": "f", "arguments": []}'),
        wrapped('{"name": "f", "arguments": {}, "more": 1}'),
        wrapped('{"name": "f", "arguments": {"a": NaN}}'),
        wrapped('{"name": "f", "arguments": {"a": 1e999}}'),
        wrapped(r'{"name": "f", "arguments": {"a": "\ud800"}}'),
        wrapped('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"),
        wrapped('{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}"),
        wrapped("{'name': 'f', 'arguments': {}}"), wrapped('{"name": "f", "arguments": {}}}'),
    ],
)  # fmt: skip
def test_hostile_and_malformed_calls_stay_text(text) -> None:
    assert split_calls(text, NAMES) == (text, [])


@pytest.mark.parametrize("text", [f"Let me see. \n {ONE}\n{TWO}", "a <tool_ b", f"x {ONE} y", "  "])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_shows_what_the_whole_text_has(text, size) -> None:
    stream = CallStream(NAMES)
    shown = "".join(stream.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = stream.finish()
    assert (shown + rest, calls) == split_calls(text, NAMES)


def test_a_templates_form_is_known_or_not(tokenizer, told) -> None:
    assert writes_calls(told) and not writes_calls(tokenizer)
    others = TEMPLATE, "{{ tools }}" + TEMPLATE, "<tool_call><function=x>{{ tools }}" + TEMPLATE
    for text in others:
        other = Tokenizer(tokenizer._backend, None, ChatTemplate(text, {}, "another"))
        assert not writes_calls(other)
    assert not writes_calls(Tokenizer(tokenizer._backend, None, None))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_an_answer_calls_a_tool_that_it_must_call(client, choice) -> None:
    """Its arguments keep to their schema; a stream has the same call."""
    options: dict[str, Any] = {
        "model": "tiny", "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "seed": 3,
        "temperature": 1.2, "max_tokens": 60,
    }  # fmt: skip
    answer = client.chat.completions.create(**options).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name in (SCHEMAS if choice == "required" else ["weather"])
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    chunks = [each.choices[0] for each in client.chat.completions.create(**options, stream=True)]
    (delta,) = [each for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert delta.index == 0 and delta.function.model_dump() == call.function.model_dump()
    assert not any(chunk.delta.content for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


@pytest.mark.exhaustive
def test_a_call_that_is_cut_stays_text(client) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, tools=TOOLS, tool_choice="required", max_tokens=12
    ).choices[0]
    assert answer.finish_reason == "length" and answer.message.tool_calls is None
    assert answer.message.content.startswith("<tool_call>")


@pytest.mark.exhaustive
def test_a_model_that_need_not_call_answers_in_text(client) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": ASKED,
        "tools": TOOLS,
        "max_tokens": 20,
        "temperature": 0,
    }
    answer = client.chat.completions.create(**options).choices[0]
    assert answer.message.tool_calls is None and answer.finish_reason in ("stop", "length")
    streamed = client.chat.completions.create(**options, stream=True, tool_choice="auto")
    shown = "".join(each.choices[0].delta.content or "" for each in streamed)
    assert shown == answer.message.content


@pytest.mark.exhaustive
def test_a_call_and_its_result_go_back_into_the_conversation(told, client) -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "refusal": None,
         "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]  # fmt: skip
    asked = ChatRequest(model="tiny", messages=messages)
    text = told.chat(asked.conversation())
    assert "assistant: <tool_call>Oslo</tool_call>\ntool: 12 degrees\n" in text
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 2}
    assert client.chat.completions.create(messages=messages, **options).choices


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tool_choice": "required"}, "not among the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "not among the tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
         "response_format and tool_choice exclude each other"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
          "tool_choice": "required"}, "the grammar is refused"),
        ({"messages": [{"role": "user", "content": None}]}, "content may be left out only"),
        ({"messages": [{"role": "user", "content": "A", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
         "tool_calls go with the role 'assistant'"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 9999}}]}]},
         "arguments must be a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "f", "arguments": '{"a": NaN}'}}]}]},
         "arguments must be a JSON object"),
    ],
)  # fmt: skip
def test_bad_requests_of_tools_get_one_clear_sentence(live, change, message) -> None:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 4, **change}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
