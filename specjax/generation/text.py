"""Text in, text out: `generate`, and `stream`, which yields every round as it is verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
import numpy as np

from specjax.generation.decoding import decode_request, failure, start_request
from specjax.generation.prompts import Prompt, check_ids
from specjax.generation.request import Request
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.rounds import step
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState

_BUCKET = 32  # prompts are padded to multiples of this
_CONTEXT = 16  # tokens before the next one that can affect its text


class Tokenizer(Protocol):
    """The methods of a tokenizer that this file uses; `specjax.load_tokenizer` returns one."""

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
      text: the text to continue; at least one token.
      max_new_tokens: the most tokens to generate, at least 1.
      drafter: proposes tokens; default QSpec().
      sampling: draws tokens; None: the greedy choice.
      key: a random key; goes with `sampling`.
      stop_tokens: tokens that end the text; None: the model's own; () for none.
      cache_bits: bits per cache entry: 16, 8 or 4.

    Returns:
      The continuation, without the given text and without the stop token.

    Raises:
      ValueError: as `specjax.decode` does, or the model's logits are NaN or infinite.
    """
    prompt = tokenizer.encode(text)
    request = Request.make(
        params, max_new_tokens=max_new_tokens, drafter=drafter, sampling=sampling,
        stop_tokens=stop_tokens, cache_bits=cache_bits,
    )  # fmt: skip
    result = decode_request(
        params, request, *_bucketed(params, prompt, request.max_new_tokens), key
    )
    if result.failed[0]:
        raise ValueError(failure(int(result.stats.generated[0])))
    output = np.asarray(result.tokens)[0, len(prompt) : np.asarray(result.lengths)[0]].tolist()
    return output_text(tokenizer, prompt, output, request.stop_tokens)


def output_text(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], stop_tokens: Sequence[int]
) -> str:
    """Returns the text of the tokens after a prompt, without a stop token at the end."""
    ended = len(output) > 0 and output[-1] in stop_tokens
    return _continuation(tokenizer, list(prompt), [*prompt, *(output[:-1] if ended else output)])


def cut(text: str, strings: Sequence[str]) -> str:
    """Cuts a text where the first of some strings begins."""
    return text[: min((i for string in strings if (i := text.find(string)) >= 0), default=None)]


@dataclasses.dataclass(frozen=True)
class Round:
    """One draft-verify round of one row.

    accepted: drafted tokens that the target kept.
    rejected: drafted tokens from the first rejected one on; empty for a tree.
    given: the target's own token, if the row still had room for it.
    """

    accepted: list[int]
    rejected: list[int]
    given: list[int]

    @property
    def tokens(self) -> list[int]:
        """All tokens that the row gained."""
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
    """Decodes one prompt and yields every round as soon as it is verified.

    The tokens are those of `specjax.decode`. The call itself checks the arguments and reads the
    prompt; each round is computed when it is asked for.

    Args:
      params: the model.
      prompt: token ids.
      max_new_tokens: the most tokens to generate, at least 1.
      drafter: proposes tokens; default QSpec().
      sampling: draws tokens; None: the greedy choice.
      key: a random key; goes with `sampling`.
      stop_tokens: tokens that end the row (kept in the output); None: the model's own; () for none.
      cache_bits: bits per cache entry: 16, 8 or 4.

    Returns:
      The rounds.

    Raises:
      ValueError: as `specjax.decode` does; in a round, the model's logits are NaN or infinite.
    """
    request = Request.make(
        params, max_new_tokens=max_new_tokens, drafter=drafter, sampling=sampling,
        stop_tokens=stop_tokens, cache_bits=cache_bits,
    )  # fmt: skip
    tokens, lengths = _bucketed(params, prompt, request.max_new_tokens)
    state = start_request(params, request, tokens, lengths, key)
    return _rounds(params, state, request.drafter)


def _rounds(params: Params, state: DecodeState, drafter: Drafter) -> Iterator[Round]:
    """Runs a state of one row to its end. The given state is donated."""
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
    if state.failed[0]:
        raise ValueError(failure(int(state.stats.generated[0])))


def _bucketed(
    params: Params, prompt: Sequence[int], max_new_tokens: int
) -> tuple[Prompt, list[int]]:
    """Pads a prompt to an integer array [1, W]; few different W, since each one is compiled anew.

    W is the next multiple of _BUCKET, or less if the model's positions end before it.
    """
    ids = check_ids(prompt)
    length = len(ids)
    room = params.config.max_position_embeddings - max_new_tokens
    width = max(length, min(-(-length // _BUCKET) * _BUCKET, room))
    return np.array([ids + [params.config.pad_id] * (width - length)]), [length]


class StopStrings:
    """Ends outputs whose text contains one of some strings: a `stop_when` for `decode_many`.

    Args:
      tokenizer: the model's tokenizer.
      prompts: token ids of every prompt, in the order given to `decode_many`.
      strings: strings that end a text; the tokens of the first occurrence stay in the output.
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
    """Turns tokens into text as they arrive, and holds back text that may still change.

    A character can span tokens, and a token's text can depend on the tokens before it. So the
    whole text is decoded every time, and a trailing replacement character is held back. Text that
    may be the beginning of one of `stops` is held back too. The text ends before the first stop;
    `ended` is true from then on, and later tokens add nothing.
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
        """Returns the text that these tokens add."""
        self._ids += ids
        text = self._text().rstrip("\ufffd")
        return self._show(text if self.ended else text[: len(text) - self._held(text)])

    def peek(self, ids: Sequence[int]) -> str:
        """Returns the text that these tokens would add after the ones pushed so far."""
        if self.ended:
            return ""
        context = self._ids[-_CONTEXT:]
        return _continuation(self._tokenizer, context, [*context, *ids])

    def finish(self) -> str:
        """Returns the text that was held back. Call it when no token follows."""
        return self._show(self._text())

    def _text(self) -> str:
        """Returns the whole text, up to the first of `stops`."""
        text = _continuation(self._tokenizer, self._prompt, self._ids)
        kept = cut(text, self._stops)
        self.ended = self.ended or kept != text
        return kept

    def _held(self, text: str) -> int:
        """Counts the characters at the end that may be the beginning of one of `stops`."""
        return max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )

    def _show(self, text: str) -> str:
        added, self._shown = text[self._shown :], max(self._shown, len(text))
        return added


def _continuation(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """Returns the text of `ids` after that of `prompt`, with which they begin."""
    before, text = tokenizer.decode(prompt), tokenizer.decode(ids)
    if not text.startswith(before):  # the prompt ends within a character
        before = before.rstrip("\ufffd")
    return text[len(before) :]
