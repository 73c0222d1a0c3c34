"""Chat completions as OpenAI writes them."""

from __future__ import annotations

from typing import Any

from specjax.serving.outputs import Gain
from specjax.serving.requests import ChatRequest
from specjax.serving.responses import Head
from specjax.serving.token_texts import TokenTexts


def head(request: ChatRequest) -> Head:
    """The head of a response."""
    return Head("chatcmpl", "chat.completion", "chat.completion.chunk", request.model)


class ChatWriter:
    """Writes the outputs of one request."""

    def __init__(self, request: ChatRequest, texts: TokenTexts) -> None:
        self._logprobs, self._most = request.logprobs, request.top_logprobs or 0
        self._texts = texts
        self._begun = set[int]()

    def chunks(self, gain: Gain) -> list[dict[str, Any]]:
        """The choices of a stream that a gain makes; none where it shows nothing."""
        made, logprobs = [], self._scored([gain])
        if gain.index not in self._begun:
            self._begun.add(gain.index)
            made.append(_chunk(gain.index, {"role": "assistant", "content": ""}, None, None))
        if gain.text or logprobs:
            made.append(_chunk(gain.index, {"content": gain.text}, logprobs, None))
        if gain.finish:
            made.append(_chunk(gain.index, {}, None, gain.finish))
        return made

    def choice(self, index: int, gains: list[Gain]) -> dict[str, Any]:
        """A whole output as one choice."""
        text = "".join(gain.text for gain in gains)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._scored(gains),
            "finish_reason": gains[-1].finish,
        }

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


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
