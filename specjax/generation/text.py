"""Text in, text out: `generate`, and `stream` for whoever wants to watch it happen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
import numpy as np

from specjax.checks import check_integer
from specjax.generation.decoding import decode_request, start_request
from specjax.generation.prompts import Prompt
from specjax.generation.request import Request
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.rounds import step
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState

_BUCKET = 32  # prompts are padded to multiples of this
_CONTEXT = 16  # tokens that can matter to how the next one reads


class Tokenizer(Protocol):
    """What text needs of a tokenizer; `specjax.load_tokenizer` returns one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def generate(
    params: Params,
    tokenizer: Tokenizer,
    text: str,
    *,
    max_new_tokens: int = 64,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_bits: int = 16,
) -> str:
    """Continues `text`.

    Args:
      params: the model.
      tokenizer: its tokenizer.
      text: what to continue; at least one token.
      max_new_tokens: most tokens to generate, at least 1.
      drafter: how tokens are proposed; default QSpec().
      sampling: how tokens are drawn; None: greedily.
      key: a random key; goes with `sampling`.
      stop_tokens: tokens that end the text; None: the model's own; () for none.
      cache_bits: bits per cache entry: 16, 8 or 4.

    Returns:
      The continuation, without the text that was given and without the stop token.

    Raises:
      ValueError: as `specjax.decode` does.
    """
    prompt = tokenizer.encode(text)
    request = Request.make(
        params, max_new_tokens=max_new_tokens, drafter=drafter, sampling=sampling,
        stop_tokens=stop_tokens, cache_bits=cache_bits,
    )  # fmt: skip
    result = decode_request(
        params, request, *_bucketed(params, prompt, request.max_new_tokens), key
    )
    output = np.asarray(result.tokens)[0, len(prompt) : np.asarray(result.lengths)[0]].tolist()
    return output_text(tokenizer, prompt, output, request.stop_tokens)


def output_text(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], stop_tokens: Sequence[int]
) -> str:
    """The text of the tokens that came after a prompt, without a stop token that ends them."""
    ended = len(output) > 0 and output[-1] in stop_tokens
    return _continuation(tokenizer, list(prompt), [*prompt, *(output[:-1] if ended else output)])


def cut(text: str, strings: Sequence[str]) -> str:
    """A text up to the first place where one of some strings begins."""
    return text[: min((i for string in strings if (i := text.find(string)) >= 0), default=None)]


@dataclasses.dataclass(frozen=True)
class Round:
    """One draft-verify round of one row.

    accepted: drafted tokens that the target kept.
    rejected: drafted tokens that it did not keep, or that came after one; of a tree, none.
    given: the target's own token, if the row still had room for it.
    """

    accepted: list[int]
    rejected: list[int]
    given: list[int]

    @property
    def tokens(self) -> list[int]:
        """What the row gained."""
        return self.accepted + self.given


def stream(
    params: Params,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 64,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_bits: int = 16,
) -> Iterator[Round]:
    """Decodes one prompt, yielding every round as soon as it is verified.

    The compiled round and the tokens are those of `specjax.decode`. The call itself checks the
    arguments and reads the prompt; the rounds are computed as they are asked for.

    Args:
      params: the model.
      prompt: token ids.
      max_new_tokens: most tokens to generate, at least 1.
      drafter: how tokens are proposed; default QSpec().
      sampling: how tokens are drawn; None: greedily.
      key: a random key; goes with `sampling`.
      stop_tokens: tokens that end the row (kept in the output); None: the model's own; () for none.
      cache_bits: bits per cache entry: 16, 8 or 4.

    Returns:
      The rounds.

    Raises:
      ValueError: as `specjax.decode` does.
    """
    request = Request.make(
        params, max_new_tokens=max_new_tokens, drafter=drafter, sampling=sampling,
        stop_tokens=stop_tokens, cache_bits=cache_bits,
    )  # fmt: skip
    tokens, lengths = _bucketed(params, prompt, request.max_new_tokens)
    state = start_request(params, request, tokens, lengths, key)
    return _rounds(params, state, request.drafter)


def _rounds(params: Params, state: DecodeState, drafter: Drafter) -> Iterator[Round]:
    """Runs a state of one row to its end. The given state is used up."""
    while not state.finished[0]:
        state, verified = step(params, state, drafter)
        proposed, drafted, accepted, emitted, count = (
            np.asarray(getattr(verified, name))[0]
            for name in ("proposed", "drafted", "accepted", "emitted", "count")
        )
        kept = min(int(accepted), int(count))
        rejected = proposed[accepted:drafted] if verified.nodes is None else proposed[:0]
        yield Round(
            accepted=emitted[:kept].tolist(),
            rejected=rejected.tolist(),
            given=emitted[kept:count].tolist(),
        )


def _bucketed(
    params: Params, prompt: Sequence[int], max_new_tokens: int
) -> tuple[Prompt, list[int] | None]:
    """One prompt as an integer array [1, W] with its length; few W, as each is compiled anew.

    W is the next multiple of _BUCKET, or less where the model's positions end before it.
    """
    ids = [check_integer("a prompt token", token) for token in prompt]
    if not ids:
        return ids, None  # for `decode_request` and `start_request` to reject
    length = len(ids)
    room = params.config.max_position_embeddings - max_new_tokens
    width = max(length, min(-(-length // _BUCKET) * _BUCKET, room))
    return np.array([ids + [params.config.pad_id] * (width - length)]), [length]


class StopStrings:
    """Ends outputs whose text holds one of some strings: a `stop_when` of `complete`.

    Args:
      tokenizer: the model's tokenizer.
      prompts: token ids of every prompt, in the order of `complete`'s.
      strings: what ends a text; the tokens of the first occurrence stay in the output.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], strings: Sequence[str]
    ) -> None:
        self._tokenizer, self._prompts, self._strings = tokenizer, prompts, tuple(strings)

    def __call__(self, number: int, output: Sequence[int]) -> bool:
        context = list(self._prompts[number][-_CONTEXT:])
        text = _continuation(self._tokenizer, context, [*context, *output])
        return any(string in text for string in self._strings)


class TextStream:
    """Turns tokens into text as they come, holding back what may still change or end it.

    A character can span tokens, and how a token reads can depend on the ones before it; so the
    whole text is decoded every time, and a trailing replacement character waits for more. So does
    what may be the beginning of one of `stops`: the text ends before the first of them, `ended` is
    true from then on, and what is pushed later adds nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._stops = tuple(stops)
        self._ids = list(prompt)
        self._shown = 0
        self.ended = False

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens add."""
        self._ids += ids
        text = self._text().rstrip("\ufffd")
        return self._show(text if self.ended else text[: len(text) - self._held(text)])

    def peek(self, ids: Sequence[int]) -> str:
        """The text that these tokens would add, after the last few that were pushed."""
        if self.ended:
            return ""
        context = self._ids[-_CONTEXT:]
        return _continuation(self._tokenizer, context, [*context, *ids])

    def finish(self) -> str:
        """The text that was held back: nothing follows that could change it."""
        return self._show(self._text())

    def _text(self) -> str:
        """All of it, up to the first of `stops`."""
        text = _continuation(self._tokenizer, self._prompt, self._ids)
        kept = cut(text, self._stops)
        self.ended = self.ended or kept != text
        return kept

    def _held(self, text: str) -> int:
        """How many characters at the end may be the beginning of one of `stops`."""
        return max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )

    def _show(self, text: str) -> str:
        added, self._shown = text[self._shown :], max(self._shown, len(text))
        return added


def _continuation(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of `ids` past that of `prompt`, which they begin with."""
    before, text = tokenizer.decode(prompt), tokenizer.decode(ids)
    if not text.startswith(before):  # the prompt breaks off within a character
        before = before.rstrip("\ufffd")
    return text[len(before) :]
