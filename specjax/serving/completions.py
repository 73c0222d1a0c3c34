"""Text completions as OpenAI writes them."""

from __future__ import annotations

from typing import Any

from specjax.serving.outputs import Gain, Outputs
from specjax.serving.requests import CompletionRequest
from specjax.serving.responses import Head
from specjax.serving.token_texts import TokenTexts
from specjax.speculation.logprobs import Logprobs

KIND = "text_completion"


def head(request: CompletionRequest) -> Head:
    """The head of a response."""
    return Head("cmpl", KIND, KIND, request.model)


class CompletionWriter:
    """Writes the outputs of one request. echoes: the text of each prompt that is sent back."""

    def __init__(
        self, request: CompletionRequest, outputs: Outputs, texts: TokenTexts, echoes: list[str]
    ) -> None:
        self._logprobs, self._texts = request.logprobs, texts
        each = outputs.count // len(outputs.prompts)
        self._echoes = [echo for echo in echoes for _ in range(each)]
        self._offsets = [len(echo) for echo in self._echoes]
        self._prompt_of = outputs.prompt_of
        self._begun = set[int]()

    def chunks(self, gain: Gain) -> list[dict[str, Any]]:
        """The choices of a stream that a gain makes; none where it shows nothing."""
        echo = "" if gain.index in self._begun else self._echoes[gain.index]
        if not (echo + gain.text or gain.finish or gain.logprobs):
            return []
        self._begun.add(gain.index)
        return [self._choice(gain, echo + gain.text)]

    def choice(self, index: int, gains: list[Gain]) -> dict[str, Any]:
        """A whole output as one choice."""
        text = self._echoes[index] + "".join(gain.text for gain in gains)
        choices = [self._choice(gain, "") for gain in gains]
        merged = None
        if self._logprobs is not None:
            merged = _merged([choice["logprobs"] for choice in choices])
        return {**choices[-1], "text": text, "logprobs": merged}

    def _choice(self, gain: Gain, text: str) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None and gain.logprobs is not None:
            offset = self._offsets[gain.index]
            logprobs = self._texts.completion(gain.tokens, gain.logprobs, self._logprobs, offset)
            self._offsets[gain.index] += sum(map(len, logprobs["tokens"]))
            if gain.echoed is not None:
                logprobs = _merged([self._of_prompt(gain.index, gain.echoed), logprobs])
        return {
            "index": gain.index, "text": text, "logprobs": logprobs, "finish_reason": gain.finish
        }  # fmt: skip

    def _of_prompt(self, index: int, echoed: Logprobs) -> dict[str, Any]:
        """The log-probabilities of a prompt's own tokens; the first follows none and has none."""
        assert self._logprobs is not None
        first, *rest = self._prompt_of(index)
        text = self._texts.text(first)
        scored = self._texts.completion(rest, echoed, self._logprobs, len(text))
        none = {"tokens": [text], "token_logprobs": [None], "text_offset": [0]}
        return _merged([{**none, "top_logprobs": [None] if self._logprobs else None}, scored])


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The log-probabilities of an output whose parts came one after the other."""
    first = parts[0]
    return {
        name: None if first[name] is None else [each for part in parts for each in part[name]]
        for name in first
    }
