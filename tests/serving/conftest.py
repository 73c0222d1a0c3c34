"""A live server that the tests of a file share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import openai
import pytest

import specjax
from checkpoints_tools.chat.template import ChatTemplate
from checkpoints_tools.tokenizer import Tokenizer
from specjax.serving.asks import Plan
from tests.support.live_server import Live, live_server

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PLAN = Plan(rows=4, context=256, queue=40, prefix_bytes=2**22, logprobs=5)


@pytest.fixture(scope="module")
def params() -> specjax.Params:
    return specjax.load("tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = specjax.load_tokenizer("tiny")._backend
    return Tokenizer(backend, None, ChatTemplate(TEMPLATE, {}, "the tests' template"))


@pytest.fixture(scope="module")
def live(params: specjax.Params, tokenizer: Tokenizer) -> Iterator[Live]:
    with usual_server(params, tokenizer) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with client_of(live) as client:
        yield client


def usual_server(
    params: specjax.Params, tokenizer: Tokenizer
) -> contextlib.AbstractContextManager[Live]:
    """A server of the tests' plan; a second one finds its programs compiled."""
    drafter = specjax.PromptLookup(draft_length=3)
    return live_server(params, tokenizer, plan=PLAN, drafter=drafter)


def client_of(live: Live) -> openai.OpenAI:
    """The official client of a server."""
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
