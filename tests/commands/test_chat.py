"""`specjax chat`: turns, a system message, /reset, and a conversation that has become too long."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest

import specjax
from checkpoints_tools.chat.template import ChatTemplate
from checkpoints_tools.tokenizer import Tokenizer
from specjax.cli import main

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
OPTIONS = ["chat", "tiny", "--context", "100", "--drafter", "autoregressive"]


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    backend = specjax.load_tokenizer("tiny")._backend
    tokenizer = Tokenizer(backend, None, ChatTemplate(TEMPLATE, {}, "the tests' template"))
    monkeypatch.setattr("specjax.load_tokenizer", lambda source: tokenizer)
    return tokenizer


def say(monkeypatch: pytest.MonkeyPatch, capsys: Any, lines: str, *options: str) -> list[str]:
    """The texts that are printed after each prompt."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main([*OPTIONS, *options]) == 0
    return capsys.readouterr().out.split("> ")[1:]


def load(monkeypatch: pytest.MonkeyPatch, *stop_tokens: int) -> specjax.Params:
    """Has the command load a model whose answers end with these tokens."""
    params = specjax.load("tiny")
    config = dataclasses.replace(params.config, stop_tokens=stop_tokens)
    params = dataclasses.replace(params, config=config)
    monkeypatch.setattr("specjax.load", lambda source, **_: params)
    return params


def answer_tokens(
    params: specjax.Params, tokenizer: Tokenizer, messages: list[tuple[str, str]]
) -> list[int]:
    """The answer of `decode` to a conversation."""
    text = tokenizer.chat([{"role": role, "content": content} for role, content in messages])
    prompt = tokenizer.encode(text, special_tokens=False)
    new = 100 - len(prompt)
    result = specjax.decode(
        params, prompt, max_new_tokens=new, drafter=specjax.Autoregressive(), cache_capacity=100
    )
    tokens = result.tokens[0, len(prompt) : result.lengths[0]].tolist()
    return [token for token in tokens if token not in params.config.stop_tokens]


def answer(params: specjax.Params, tokenizer: Tokenizer, messages: list[tuple[str, str]]) -> str:
    """Its text."""
    return tokenizer.decode(answer_tokens(params, tokenizer, messages))


def test_a_turn_sees_those_before_it_until_a_reset(tokenizer, monkeypatch, capsys) -> None:
    system = ("system", "Be brief.")
    endless = answer_tokens(load(monkeypatch), tokenizer, [system, ("user", "Hello")])
    # The processor decides what a model says, so answers end with a token that it does say here.
    last = next(token for i, token in enumerate(endless) if i > 4 and token not in endless[:i])
    params = load(monkeypatch, last)
    first = answer(params, tokenizer, [system, ("user", "Hello")])
    said = say(monkeypatch, capsys, "Hello\nHello\n/reset\nHello\n\n", "--system", "Be brief.")
    assert said[0] == f"{first}\n"
    assert 1 < len(tokenizer.encode(first)) < 40, "no room for a second turn"
    history = [system, ("user", "Hello"), ("assistant", first), ("user", "Hello")]
    assert said[1] == f"{answer(params, tokenizer, history)}\n"
    assert said[2] == "(new conversation)\n"
    assert said[3] == f"{first}\n"


def test_a_conversation_that_fills_the_context_says_so(tokenizer, monkeypatch, capsys) -> None:
    params = load(monkeypatch)
    first = answer(params, tokenizer, [("user", "Hello")])
    said = say(monkeypatch, capsys, "Hello\nHello\n/reset\nHello\n\n")
    assert said[0] == f"{first}\n" and said[3] == f"{first}\n"
    assert "/reset starts a new one" in said[1]


def test_a_trace_marks_where_tokens_came_from(tokenizer, monkeypatch, capsys) -> None:
    (said, *_) = say(monkeypatch, capsys, "Hello\n", "--trace")
    assert "{+" in said


def test_a_context_out_of_range_is_refused(tokenizer, capsys) -> None:
    assert main(["chat", "tiny", "--context", "100000"]) == 1
    assert "--context must be in 4 … 512, got 100000" in capsys.readouterr().err
