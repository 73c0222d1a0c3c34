"""The room of an engine, an output that somebody asks it for, and the pieces in which it comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import numpy as np

from specjax.generation.batch_rows import Waiting
from specjax.generation.constraints import Guide
from specjax.generation.kinds import Kind
from specjax.generation.request import threefry
from specjax.serving.requests import MOST_BIASES
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.penalties import LogitBias
from specjax.speculation.sampling import IDLE, Sampling

Finish = Literal["stop", "length", "error"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The room of an engine.

    rows: outputs made at a time.
    context: tokens of a prompt and its output.
    queue: outputs that may wait for a row.
    prefix_bytes: memory for the beginnings that prompts share; 0 for none.
    logprobs: the most probable tokens that one may ask for at each place.
    """

    rows: int = 8
    context: int = 2048
    queue: int = 64
    prefix_bytes: int = 2**28
    logprobs: int = 20


class Piece(NamedTuple):
    """The gain of an output in some rounds; `finish` is not None in its last piece.

    error: why it ended early.
    echoed: in the first piece, log-probabilities of the prompt's own tokens but the first.
    """

    tokens: list[int]
    logprobs: Logprobs | None = None
    finish: Finish | None = None
    error: str | None = None
    echoed: Logprobs | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Ask:
    """One output that somebody asks for.

    tokens: the prompt, int32[T].
    max_new_tokens: the most tokens to generate.
    sampling: draws them, each field one number; None: the greedy choice.
    seed, folds: the random key is that of the seed, with these numbers folded in.
    scored: whether pieces have log-probabilities.
    echoed: whether the prompt's own tokens have some too.
    stop: tells of the new tokens whether they hold an end; once true, it stays true.
    stop_tokens: tokens that end it, beside the model's own.
    send: is told of every piece, in the engine's thread; it must not wait.
    guide: holds it to a grammar; None: it is free.
    live: whether somebody waits for every piece, not for the last one.
    """

    tokens: np.ndarray
    max_new_tokens: int
    sampling: Sampling | None
    seed: int
    folds: tuple[int, ...]
    scored: bool
    echoed: bool
    stop: Callable[[list[int]], bool] | None
    stop_tokens: frozenset[int]
    send: Callable[[Piece], None]
    guide: Guide | None = None
    live: bool = True

    @property
    def watched(self) -> bool:
        """Whether to look at it after few rounds: somebody waits, or it may end at any token."""
        return self.live or self.stop is not None or bool(self.stop_tokens)

    def key(self) -> jax.Array:
        """The random key, [1]."""
        key = jax.random.key(self.seed)
        for number in self.folds:
            key = jax.random.fold_in(key, number)
        return threefry(key)[None]

    def waiting(self, number: int) -> Waiting:
        """The prompt as a batch takes it."""
        limit = len(self.tokens) + self.max_new_tokens
        sampling = arrays_of(self.sampling or Sampling(top_k=1))
        return Waiting(
            number, self.tokens, limit, self.key(), sampling, self.guide, self._kind(), self.echoed
        )

    def _kind(self) -> Kind:
        if self.sampling is not None and self.sampling.penalizes:
            return Kind.PENALIZED
        if self.scored:
            return Kind.SCORED
        return Kind.GREEDY if self.sampling is None else Kind.DRAWN

    def end(self, output: list[int], new: int) -> int | None:
        """Where the output ends: the number of tokens up to the first of the last `new` ones that
        ends it."""
        if self.stop is None and not self.stop_tokens:
            return None
        lengths = range(len(output) - new + 1, len(output) + 1)
        return next((length for length in lengths if self._ended(output[:length])), None)

    def _ended(self, output: list[int]) -> bool:
        return output[-1] in self.stop_tokens or (self.stop is not None and self.stop(output))


def arrays_of(sampling: Sampling) -> Sampling:
    """The same with every field as an array [1]: None becomes the number that changes nothing."""
    most = np.iinfo(np.int32).max
    top_k = most if sampling.top_k is None else min(int(sampling.top_k), most)
    numbers = {"temperature": sampling.temperature}
    for name, idle in IDLE.items():
        given = getattr(sampling, name)
        numbers[name] = idle if given is None else given
    return Sampling(
        top_k=np.array([top_k], np.int32),
        logit_bias=sampling.logit_bias or LogitBias.of([{}], width=MOST_BIASES),
        **{name: np.array([value], np.float32) for name, value in numbers.items()},
    )
