"""Tokens as text: what a tokenizer must do, texts that end an output, and text as it arrives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

_CONTEXT = 16  # tokens before the next one that can affect its text
_OPEN = 64  # last tokens whose text a stream may decode again


class TokenCodec(Protocol):
    """The methods of a tokenizer that decoding uses; `specjax.load_tokenizer` returns one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer with a chat template, as `specjax.load_tokenizer` returns one."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str: ...


class ToolTokenizer(ChatTokenizer, Protocol):
    """A tokenizer whose chat template may be told of tools."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str: ...


def output_text(
    tokenizer: TokenCodec, prompt: Sequence[int], output: Sequence[int], stop_tokens: Sequence[int]
) -> str:
    """Returns the text of the tokens after a prompt, without a stop token at the end."""
    ended = len(output) > 0 and output[-1] in stop_tokens
    return _continuation(tokenizer, list(prompt), [*prompt, *(output[:-1] if ended else output)])


def cut(text: str, strings: Sequence[str]) -> str:
    """Cuts a text where the first of some strings begins."""
    return text[: min((i for string in strings if (i := text.find(string)) >= 0), default=None)]


class StopStrings:
    """Ends outputs whose text contains one of some strings: a `stop_when` for `decode_many`.

    Args:
      tokenizer: the model's tokenizer.
      prompts: token ids of every prompt, in the order given to `decode_many`.
      strings: strings that end a text; the tokens of the first occurrence stay in the output.
    """

    def __init__(
        self, tokenizer: TokenCodec, prompts: Sequence[Sequence[int]], strings: Sequence[str]
    ) -> None:
        self._watches = [StopWatch(tokenizer, prompt, strings) for prompt in prompts]

    def __call__(self, number: int, output: Sequence[int]) -> bool:
        return self._watches[number](output)


class StopWatch:
    """Tells of one output, as it grows, whether its text contains one of some strings.

    It reads every token once; an output that does not begin with the one before is read anew.
    """

    def __init__(
        self, tokenizer: TokenCodec, prompt: Sequence[int], strings: Sequence[str]
    ) -> None:
        self._new_stream = partial(TextStream, tokenizer, prompt, strings)
        self._stream, self._read = self._new_stream(), list[int]()

    def __call__(self, output: Sequence[int]) -> bool:
        if self._read != list(output[: len(self._read)]):
            self._stream, self._read = self._new_stream(), []
        self._stream.push(output[len(self._read) :])
        self._read = list(output)
        return self._stream.ended


class TextStream:
    """Turns tokens into text as they arrive, and holds back text that may still change.

    A character can span tokens, and a token's text can depend on the tokens before it. So the last
    tokens are decoded every time, and a trailing replacement character is held back. Text that
    may be the beginning of one of `stops` is held back too. The text ends before the first stop;
    `ended` is true from then on, and later tokens add nothing.
    """

    def __init__(
        self, tokenizer: TokenCodec, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._before, self._ids = list(prompt[-_CONTEXT:]), list[int]()  # context, and open tokens
        self._settled = ""  # the text of the tokens before them
        self._stops = tuple(stops)
        self._shown = 0
        self.ended = False

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that these tokens add."""
        self._ids += ids
        self._settle()
        text = self._text().rstrip("\ufffd")
        return self._show(text if self.ended else text[: len(text) - self._held(text)])

    def peek(self, ids: Sequence[int]) -> str:
        """Returns the text that these tokens would add after the ones pushed so far."""
        if self.ended:
            return ""
        context = [*self._before, *self._ids][-_CONTEXT:]
        return _continuation(self._tokenizer, context, [*context, *ids])

    def finish(self) -> str:
        """Returns the text that was held back. Call it when no token follows."""
        return self._show(self._text())

    def _text(self) -> str:
        """Returns the whole text, up to the first of `stops`."""
        text = self._settled + self._after(self._ids)
        kept = cut(text, self._stops)
        self.ended = self.ended or kept != text
        return kept

    def _settle(self) -> None:
        """Takes the first of many open tokens as they are, unless a character goes on behind them.

        So the time per token does not grow with the text.
        """
        first, last = self._ids[:-_CONTEXT], self._ids[-_CONTEXT:]
        if len(first) >= _OPEN and not (text := self._after(first)).endswith("\ufffd"):
            self._settled += text
            self._before, self._ids = first[-_CONTEXT:], last

    def _after(self, ids: list[int]) -> str:
        """Returns the text of tokens behind the context."""
        return _continuation(self._tokenizer, self._before, [*self._before, *ids])

    def _held(self, text: str) -> int:
        """Counts the characters at the end that may be the beginning of one of `stops`."""
        return max((_begun(text, stop) for stop in self._stops), default=0)

    def _show(self, text: str) -> str:
        added, self._shown = text[self._shown :], max(self._shown, len(text))
        return added


def _begun(text: str, stop: str) -> int:
    """Counts the characters at the end of a text with which `stop`, or a part of it, begins."""
    place = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while place >= 0 and not stop.startswith(text[place:]):
        place = text.find(stop[0], place + 1)
    return len(text) - place if place >= 0 else 0


def _continuation(tokenizer: TokenCodec, prompt: list[int], ids: list[int]) -> str:
    """Returns the text of `ids` after that of `prompt`, with which they begin."""
    before, text = tokenizer.decode(prompt), tokenizer.decode(ids)
    if not text.startswith(before):  # the prompt ends within a character
        before = before.rstrip("\ufffd")
    return text[len(before) :]
