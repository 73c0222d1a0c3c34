"""Text in, text out: `generate`, and `stream` for whoever wants to watch it happen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from specjax.decoding import decode, start, step
from specjax.drafting import Drafter, QSpec
from specjax.params import Params


class Tokenizer(Protocol):
    """What text needs of a tokenizer; `specjax.load_tokenizer` returns one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def generate(params: Params, tokenizer: Tokenizer, text: str, **options: Any) -> str:
    """Continues `text`.

    Args:
      params: the model.
      tokenizer: its tokenizer.
      text: what to continue; at least one token.
      **options: `specjax.decode`'s, for example max_new_tokens=64, drafter=specjax.QSpec().

    Returns:
      The continuation, without the text that was given and without the stop token.

    Raises:
      ValueError: as `specjax.decode` does.
    """
    prompt = tokenizer.encode(text)
    result = decode(params, prompt, **options)
    ids = np.asarray(result.tokens[0, : result.lengths[0]]).tolist()
    if ids[-1] in _stop_tokens(params, options) and len(ids) > len(prompt):
        ids.pop()
    return _continuation(tokenizer, prompt, ids)


@dataclasses.dataclass(frozen=True)
class Round:
    """One draft-verify round of one row.

    accepted: drafted tokens that the target kept.
    rejected: drafted tokens that it did not keep, or that came after one.
    given: the target's own token, if the row still had room for it.
    """

    accepted: list[int]
    rejected: list[int]
    given: list[int]

    @property
    def tokens(self) -> list[int]:
        """What the row gained."""
        return self.accepted + self.given


def stream(params: Params, prompt: Sequence[int], **options: Any) -> Iterator[Round]:
    """Decodes one prompt, yielding every round as soon as it is verified.

    The compiled round and the tokens are those of `specjax.decode`.

    Args:
      params: the model.
      prompt: token ids.
      **options: `specjax.decode`'s.

    Raises:
      ValueError: as `specjax.decode` does.
    """
    drafter: Drafter = options.pop("drafter", None) or QSpec()
    state = start(params, list(prompt), drafter=drafter, **options)
    while not state.finished[0]:
        state, verified = step(params, state, drafter)
        proposed, accepted, emitted, count = (
            np.asarray(field)[0]
            for field in jax.device_get(
                (verified.proposed, verified.accepted, verified.emitted, verified.count)
            )
        )
        kept = min(int(accepted), int(count))
        yield Round(
            accepted=emitted[:kept].tolist(),
            rejected=proposed[accepted:].tolist(),
            given=emitted[kept:count].tolist(),
        )


class TextStream:
    """Turns tokens into text as they come, holding back what may still change.

    A character can span tokens, and how a token reads can depend on the ones before it; so the
    whole text is decoded every time, and a trailing replacement character waits for more.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._ids = list(prompt)
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens add."""
        self._ids += ids
        text = _continuation(self._tokenizer, self._prompt, self._ids)
        end = len(text.rstrip("\ufffd"))
        added, self._shown = text[self._shown : end], max(self._shown, end)
        return added


def _continuation(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of `ids` past that of `prompt`, which they begin with."""
    return tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]


def _stop_tokens(params: Params, options: dict[str, Any]) -> Sequence[int]:
    stop_tokens = options.get("stop_tokens")
    return params.config.stop_tokens if stop_tokens is None else stop_tokens
