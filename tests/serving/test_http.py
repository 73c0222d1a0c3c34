"""The server as its clients see it: the official one, careless ones, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from itertools import count
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

import specjax
from specjax.serving.asks import Plan
from specjax.serving.errors import HostGoneError
from specjax.serving.limits import Limits
from tests.support.live_server import TOKENS, Live, live_server, metrics, until

MESSAGES: list[Any] = [
    {"role": "system", "content": "You tell stories."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Once upon"}, {"type": "text", "text": " a"}],
    },
]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


def conversation(tokenizer: Any) -> list[int]:
    text = "system: You tell stories.\nuser: Once upon a\nassistant:"
    return tokenizer.encode(text, special_tokens=False)


def post(live: Live, body: Any, path: str = "completions", **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    return httpx.post(
        f"{live.url}/v1/{path}", timeout=60, content=content, headers=headers, **options
    )


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_conversation_is_answered(params, tokenizer, client) -> None:
    found = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=12, **GREEDY)
    prompt = conversation(tokenizer)
    expected = specjax.decode(params, prompt, max_new_tokens=12).tokens[0, len(prompt) :]
    choice = found.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(expected)
    assert choice.finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), 12)


def test_a_stream_has_the_same_text_and_its_usage(client) -> None:
    options = {"messages": MESSAGES, "max_tokens": 12, "n": 2, **GREEDY}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **options
        )
    )
    for index, choice in enumerate(whole.choices):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chats_logprobs(client) -> None:
    found = client.chat.completions.create(
        messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, **GREEDY
    )
    entries = found.choices[0].logprobs.content
    assert len(entries) == 5
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob > entry.top_logprobs[1].logprob
        assert bytes(entry.bytes).decode() == entry.token
    assert "".join(entry.token for entry in entries) == found.choices[0].message.content


def test_the_context_is_the_default_length_of_an_answer(tokenizer, client) -> None:
    found = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    stopped = found.choices[0].finish_reason == "stop"
    assert stopped or found.usage.total_tokens == 256


def test_stops_and_echo(client) -> None:
    ask = client.completions.create
    whole = ask(prompt="Once upon a time", max_tokens=20, **GREEDY).choices[0].text
    word = whole.split()[5]
    stopped = ask(prompt="Once upon a time", max_tokens=20, stop=[word], echo=True, **GREEDY)
    assert stopped.choices[0].text == "Once upon a time" + whole[: whole.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = ask(prompt="Once upon a time", max_tokens=20, stop=word, stream=True, **GREEDY)
    assert "".join(each.choices[0].text for each in streamed) == whole[: whole.index(word)]


def test_a_token_can_end_an_output(params, tokenizer, client) -> None:
    prompt = tokenizer.encode("Once upon a time")
    output = specjax.decode(params, prompt, max_new_tokens=12).tokens[0, len(prompt) :].tolist()
    found = client.completions.create(
        prompt=prompt, max_tokens=12, extra_body={"stop_token_ids": [output[5]]}, **GREEDY
    )
    kept = output.index(output[5])
    assert found.choices[0].text == tokenizer.decode(output[:kept])
    assert found.usage.completion_tokens == kept + 1
    assert found.choices[0].finish_reason == "stop"


def test_outputs_without_a_seed_differ(client) -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 30, "temperature": 1}
    texts = {client.completions.create(**asked).choices[0].text for _ in range(2)}
    assert len(texts) == 2


def test_models_health_and_metrics(live, client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "specjax"
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
    before = metrics(live)
    client.completions.create(prompt="The king and the king and the", max_tokens=30, **GREEDY)
    after = metrics(live)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained[TOKENS] == 30
    assert gained["specjax:prompt_tokens_total"] > 0
    assert gained["specjax:inter_token_latency_seconds_count"] == 1
    assert 0 < gained["specjax:inter_token_latency_seconds_sum"] < 60
    drafts = gained["specjax:spec_decode_num_drafts_total"]
    accepted = gained["specjax:spec_decode_num_accepted_tokens_total"]
    assert drafts > 0 and accepted <= gained["specjax:spec_decode_num_draft_tokens_total"]
    places = [x for name, x in gained.items() if "accepted_tokens_per_pos_total" in name]
    assert sum(places) == accepted > 0
    assert after["specjax:num_requests_running"] == after["specjax:num_requests_waiting"] == 0


VALID = {**GREEDY, "prompt": "A", "max_tokens": 2}
REFUSED: list[tuple[Any, int, str]] = [
    (b"{", 400, "the body is not JSON"),
    (b"\xff\xfe", 400, "body"),
    (b"[" * 100_000, 400, "body"),
    (b"[]", 400, "must be a valid dictionary"),
    ({"prompt": "A"}, 400, "model is missing"),
    ({**VALID, "model": "gpt"}, 404, "the model here is 'tiny', got 'gpt'"),
    ({**VALID, "temperature": "hot"}, 400, "temperature must be a valid number, got 'hot'"),
    ({**VALID, "temperature": 5}, 400, "temperature must be less than or equal to 2, got 5"),
    (b'{"model": "tiny", "prompt": "A", "temperature": NaN}', 400, "temperature must be a finite"),
    (b'{"model": "tiny", "prompt": "A", "seed": ' + b"9" * 5000 + b"}", 400, "body"),
    ({**VALID, "seed": 10**30}, 400, "seed must be"),
    ({**VALID, "top_p": 0}, 400, "top_p must be greater than 0, got 0"),
    ({**VALID, "n": 1000}, 400, "n must be less than or equal to 128"),
    ({**VALID, "n": 60}, 400, "up to 44 outputs"),
    ({**VALID, "max_tokens": 0}, 400, "max_tokens must be greater than or equal to 1, got 0"),
    ({**VALID, "max_tokens": 10**6}, 400, "the context has 256 tokens"),
    ({**VALID, "prompt": "word " * 300}, 400, "the context has 256 tokens"),
    ({**VALID, "prompt": ""}, 400, "a prompt is empty"),
    ({**VALID, "prompt": []}, 400, "prompt"),
    ({**VALID, "prompt": [4096]}, 400, "outside the vocabulary of 4096"),
    ({**VALID, "prompt": [-1]}, 400, "prompt"),
    ({**VALID, "prompt": [[1, 2], "A"]}, 400, "prompt"),
    (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "prompt"),
    ({**VALID, "stop": [""]}, 400, "stop"),
    ({**VALID, "logprobs": 20}, 400, "up to 5"),
    ({**VALID, "frequency_penalty": 2.5}, 400, "frequency_penalty must be less than or equal to 2"),
    ({**VALID, "presence_penalty": "much"}, 400, "presence_penalty must be a valid number"),
    ({**VALID, "repetition_penalty": 0}, 400, "repetition_penalty must be greater"),
    ({**VALID, "logit_bias": [1]}, 400, "logit_bias must be a valid dictionary"),
    ({**VALID, "logit_bias": {"5x": 1}}, 400, "logit_bias"),
    ({**VALID, "logit_bias": {"5": 101}}, 400, "must be less than or equal to 100"),
    ({**VALID, "logit_bias": {"4096": 1}}, 400, "token 4096, outside the vocabulary of 4096"),
    ({**VALID, "logit_bias": {str(n): 1 for n in range(301)}}, 400, "at most 300"),
    ({**VALID, "suffix": "x"}, 400, "suffix"),
    ({**VALID, "best_of": 3}, 400, "best_of must be n"),
    ({**VALID, "stream_options": {}}, 400, "stream_options goes with stream=true"),
    ({**VALID, "temprature": 1}, 400, "temprature is not a field of this request"),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED)
def test_bad_requests_get_one_clear_sentence(live, body, status, message) -> None:
    answer = post(live, body)
    assert answer.status_code == status, answer.text
    assert message in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs goes with logprobs=true"),
        ({"response_format": {"type": "yaml"}}, "response_format.type must be"),
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
    ],
)
def test_bad_conversations_get_one_clear_sentence(live, change, message) -> None:
    answer = post(live, {**GREEDY, "messages": MESSAGES, **change}, "chat/completions")
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]


@pytest.mark.parametrize("place", ["mounted", "behind a proxy"])
def test_a_key_is_asked_for_under_any_root(place: str) -> None:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("open")(scope, receive, send)

    limited = Limits(answers, 100, "secret")
    mounted = place == "mounted"
    app = Starlette(routes=[Mount("/llm", limited)]) if mounted else limited

    async def status(path: str, **headers: str) -> int:
        transport = httpx.ASGITransport(app, root_path="" if mounted else "/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get(f"/llm{path}", headers=headers)).status_code

    async def statuses() -> list[int]:
        given = {"Authorization": "Bearer secret"}
        return [await status("/v1/models"), await status("/v1/models", **given),
                await status("/health")]  # fmt: skip

    assert asyncio.run(statuses()) == [401, 200, 200]


@pytest.mark.parametrize(
    ("path", "field", "asked"),
    [
        ("completions", "prompt", {"prompt": "word " * 300}),
        ("chat/completions", "messages", {"messages": MESSAGES, "max_tokens": 256}),
    ],
)
def test_a_text_that_does_not_fit_is_named(live, path, field, asked) -> None:
    error = error_of(post(live, {**GREEDY, **asked}, path))
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_unknown_paths_and_methods(live) -> None:
    assert error_of(httpx.get(f"{live.url}/v1/nothing"))["message"] == "Not Found"
    assert httpx.get(f"{live.url}/v1/completions").status_code == 405


@pytest.mark.parametrize("declared", [True, False])
def test_a_huge_body_is_not_read(live, declared) -> None:
    body = b'{"prompt": "' + b"x" * 10_000_000
    content: Any = body if declared else iter([body[i : i + 2**16] for i in range(0, 10**7, 2**16)])
    try:
        answer = httpx.post(f"{live.url}/v1/completions", content=content, timeout=30)
    except httpx.WriteError:  # the server has closed the connection in the middle of the body
        assert not declared
    else:
        assert answer.status_code == 413
        assert "1048576 bytes" in error_of(answer)["message"]
    assert post(live, VALID).status_code == 200


def test_dropped_connections_leave_nothing(live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    for number in range(500):
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall(head[: number % (len(head) + 1)])
    assert post(live, VALID).status_code == 200
    assert live.engine.open == 0


def test_a_slow_reader_holds_no_row(live) -> None:
    """It reads nothing of a stream; the engine finishes its outputs all the same."""
    fields = {"prompt": "A king", "max_tokens": 200, "n": 4, "stream": True, "logprobs": 5}
    body = json.dumps({**GREEDY, **fields}).encode()
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        before = metrics(live)[TOKENS]
        connection.sendall(head.encode() + body)
        until(lambda: metrics(live)[TOKENS] > before and not live.engine.open)
    assert post(live, VALID).status_code == 200


def test_an_engine_that_fails_says_so_and_goes_on(live, client, monkeypatch) -> None:
    before = client.completions.create(prompt="A", max_tokens=8, **GREEDY).choices[0].text

    class Panic(BaseException):
        """What a library in Rust raises where it panics."""

    def fail() -> None:
        raise Panic("the grammar is too hard")

    monkeypatch.setattr(live.engine._batch, "fill", fail)
    with pytest.raises(openai.InternalServerError, match=r"the engine failed \(Panic\)"):
        client.completions.create(prompt="A", max_tokens=8, **GREEDY)
    assert client.completions.create(prompt="A", max_tokens=8, **GREEDY).choices[0].text == before
    # The second time it fails in the midst of an output, once its beginning has been heard.
    heard, calls, fill = threading.Event(), count(), live.engine._batch.fill

    def fail_when_heard() -> None:
        if next(calls) > 1 and heard.wait(60):
            fail()
        fill()

    monkeypatch.setattr(live.engine._batch, "fill", fail_when_heard)
    stream = client.completions.create(prompt="A", max_tokens=200, stream=True, **GREEDY)
    text = next(iter(stream)).choices[0].text
    heard.set()
    with pytest.raises(openai.APIError, match="starts anew"):
        list(stream)
    again = client.completions.create(prompt="A", max_tokens=8, **GREEDY)
    assert again.choices[0].text == before and before.startswith(text[:1])
    assert metrics(live)["specjax:engine_failures_total"] == 2


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("why", ["it cannot start anew", "another host is gone"])
def test_an_engine_that_ends_ends_the_server(why, params, tokenizer, monkeypatch) -> None:
    """Whoever waits is told so, those whose prompts nobody has taken up yet among them."""
    plan = Plan(rows=1, context=256, queue=1, logprobs=0)
    with live_server(params, tokenizer, plan=plan, drafter=specjax.Autoregressive()) as live:

        def fail(*_: Any) -> None:
            raise HostGoneError(why) if why == "another host is gone" else RuntimeError(why)

        monkeypatch.setattr(live.engine._batch, "add", fail)
        monkeypatch.setattr(live.engine, "_new_batch", fail)
        answer = post(live, {**GREEDY, "prompt": "A", "max_tokens": 8, "n": 2})
        assert answer.status_code == 500
        assert re.search("the engine failed|the server ends", error_of(answer)["message"])
        deadline = time.monotonic() + 30
        with pytest.raises(httpx.TransportError):
            while time.monotonic() < deadline:
                httpx.get(f"{live.url}/health")
        assert isinstance(live.engine.gone, Exception) and str(live.engine.gone) == why


def test_a_full_queue_a_key_and_an_ending(params, tokenizer, caplog) -> None:
    plan = Plan(rows=1, context=256, queue=1, logprobs=0)
    drafter = specjax.Autoregressive()
    with live_server(
        params, tokenizer, plan=plan, drafter=drafter, key="secret", log_prompts=True, grace=30
    ) as live:
        for given in ({}, {"Authorization": "Bearer public"}, {"Authorization": "Bearer \xe9"}):
            coded = {name: value.encode("latin-1") for name, value in given.items()}
            answer = post(live, VALID, headers=coded)
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
        assert httpx.get(f"{live.url}/health").status_code == 200
        assert httpx.get(f"{live.url}/nothing").status_code == 401
        key = {"Authorization": "Bearer secret"}
        long = {**GREEDY, "prompt": "A", "max_tokens": 250}
        released = threading.Event()
        live.engine._inbox.put(lambda: released.wait(60))  # nothing finishes before
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(post(live, long, headers=key)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: live.engine.open == 2)
        busy = post(live, VALID, headers=key)
        assert (busy.status_code, busy.headers["Retry-After"]) == (429, "1")
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert post(live, {**VALID, "stream": True}, headers=key).status_code == 429
        assert '"completion_tokens": 0' in caplog.text
        assert '"prompts": ["A"]' in caplog.text
        assert "1 outputs may wait" in error_of(busy)["message"]
        live.server.end_soon()
        until(lambda: live.engine.draining)
        ending = post(live, VALID, headers=key)
        assert ending.status_code == 503
        assert "the server ends" in error_of(ending)["message"]
        released.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]
