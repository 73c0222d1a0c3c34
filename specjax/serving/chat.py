"""Chat completions as OpenAI writes them."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any

from specjax.serving.outputs import Gain
from specjax.serving.requests import ChatRequest
from specjax.serving.responses import Head
from specjax.serving.token_texts import TokenTexts
from specjax.serving.tools import Call, CallStream, split_calls


def head(request: ChatRequest) -> Head:
    """The head of a response."""
    return Head("chatcmpl", "chat.completion", "chat.completion.chunk", request.model)


class ChatWriter:
    """Writes the outputs of one request. names: the tools whose calls are looked for."""

    def __init__(self, request: ChatRequest, texts: TokenTexts, names: Collection[str]) -> None:
        self._logprobs, self._most = request.logprobs, request.top_logprobs or 0
        self._texts, self._names = texts, names
        self._begun = dict[int, CallStream]()

    def chunks(self, gain: Gain) -> list[dict[str, Any]]:
        """The choices of a stream that a gain makes; none where it shows nothing."""
        made, logprobs = [], self._scored([gain])
        if gain.index not in self._begun:
            self._begun[gain.index] = CallStream(self._names)
            made.append(_chunk(gain.index, {"role": "assistant", "content": ""}, None, None))
        text, calls = self._split(gain)
        if text or logprobs:
            made.append(_chunk(gain.index, {"content": text}, logprobs, None))
        if calls:
            listed = [{"index": number, **_call(call)} for number, call in enumerate(calls)]
            made.append(_chunk(gain.index, {"tool_calls": listed}, None, None))
        if gain.finish:
            made.append(_chunk(gain.index, {}, None, _finish(gain, calls)))
        return made

    def _split(self, gain: Gain) -> tuple[str, list[Call]]:
        """The text that a gain shows, and at the end of an output its calls."""
        if not self._names:
            return gain.text, []
        stream = self._begun[gain.index]
        text = stream.push(gain.text)
        if not gain.finish:
            return text, []
        rest, calls = stream.finish()
        return text + rest, calls

    def choice(self, index: int, gains: list[Gain]) -> dict[str, Any]:
        """A whole output as one choice."""
        text, calls = "".join(gain.text for gain in gains), list[Call]()
        if self._names:
            text, calls = split_calls(text, self._names)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(call) for call in calls]}
        return {
            "index": index, "message": message, "logprobs": self._scored(gains),
            "finish_reason": _finish(gains[-1], calls),
        }  # fmt: skip

    def _scored(self, gains: list[Gain]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        entries = [
            entry
            for gain in gains
            if gain.logprobs is not None
            for entry in self._texts.chat(gain.tokens, gain.logprobs, self._most)
        ]
        return {"content": entries, "refusal": None}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _finish(gain: Gain, calls: list[Call]) -> str | None:
    return "tool_calls" if calls and gain.finish == "stop" else gain.finish


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
