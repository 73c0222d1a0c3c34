"""From a checked request to outputs: prompts into the engine, and pieces back as text.

All outputs of one request come through one mailbox. The engine never waits for a reader: a slow one
leaves its pieces in the mailbox, and no output has more than its context holds.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import numpy as np

from specjax.generation.constraints import CANNOT_BE_FOLLOWED, Guide
from specjax.generation.text import ChatTokenizer, StopWatch, TextStream
from specjax.serving.asks import Ask, Finish, Piece
from specjax.serving.engine import Engine
from specjax.serving.errors import Refused
from specjax.serving.mailbox import Mailbox
from specjax.serving.requests import ChatRequest, Common
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.penalties import LogitBias
from specjax.speculation.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Gain:
    """The gain of one output of a request.

    index: the output's number.
    text: new text; a stop text and the model's own end are not in it.
    tokens: new tokens, those of the end among them.
    logprobs: log-probabilities of the tokens; None: not asked for.
    finish: not None in the last gain.
    echoed: in the first gain, log-probabilities of the prompt's own tokens but the first.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: Logprobs | None
    finish: Finish | None
    echoed: Logprobs | None = None


class Outputs:
    """The outputs of one request: `n` of each prompt, those of the first prompt first.

    engine: makes them.
    tokenizer: the model's.
    request: how to make them.
    prompts: token ids.
    new: the most tokens of each output; None: as many as the context has room for.
    scored: whether log-probabilities are asked for.
    echoed: whether those of the prompts' own tokens are.
    guide: holds the outputs to a grammar; None: they are free.

    count: outputs.

    Raises Refused where a prompt does not fit.
    """

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, request: Common,
        prompts: Sequence[Sequence[int]], new: int | None, scored: bool, echoed: bool = False,
        guide: Guide | None = None,
    ) -> None:  # fmt: skip
        self._engine, self.request, self.prompts = engine, request, prompts
        self._each, self._scored, self._echoed = request.n or 1, scored, echoed
        self.count = len(prompts) * self._each
        self._tokens, self.finishes = Counter[int](), dict[int, Finish]()
        self.first: float | None = None
        self.begun = time.perf_counter()
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        self._new = [_room(engine, prompt, new, param) for prompt in prompts]
        self._sampling, self._guide = _sampling(engine, request), guide
        self._stop_tokens = {*engine.stop_tokens, *(request.stop_token_ids or ())}
        if self.count > engine.plan.rows + engine.plan.queue:
            most = engine.plan.rows + engine.plan.queue
            message = f"a request may have up to {most} outputs here, and this one has {self.count}"
            raise Refused(400, message, param="n")
        self._tokenizer = tokenizer
        self._texts = [
            TextStream(tokenizer, self.prompt_of(index), request.stops())
            for index in range(self.count)
        ]

    @property
    def generated(self) -> int:
        """The tokens of all outputs so far."""
        return self._tokens.total()

    def prompt_of(self, index: int) -> Sequence[int]:
        """The prompt of an output."""
        return self.prompts[index // self._each]

    async def gains(self) -> AsyncIterator[Gain]:
        """Makes the outputs, and yields what they gain until all are finished.

        Whoever stops listening gives them up. Raises Refused where the engine takes no more, and
        where an output fails.
        """
        self._box, seed = Mailbox(bool(self.request.stream)), self._seed()
        put = self._box.put
        asks = [self._ask(index, seed, partial(put, index)) for index in range(self.count)]
        numbers = self._engine.submit(asks)
        try:
            while len(self.finishes) < self.count:
                for index, piece in (await self._box.take()).items():
                    yield self._gain(index, piece)
        finally:
            self._engine.cancel(numbers)

    def _seed(self) -> int:
        return secrets.randbits(32) if self.request.seed is None else self.request.seed

    def _ask(self, index: int, seed: int, send: Callable[[Piece], None]) -> Ask:
        number, sample = divmod(index, self._each)
        prompt, stops, stop = self.prompts[number], self.request.stops(), None
        if stops:
            stop = StopWatch(self._tokenizer, prompt, stops)
        return Ask(
            tokens=np.array(prompt, np.int32),
            max_new_tokens=self._new[number],
            sampling=self._sampling,
            seed=seed,
            folds=(number, sample) if self._each > 1 else (number,),
            scored=self._scored,
            echoed=self._echoed,
            stop=stop,
            stop_tokens=frozenset(self.request.stop_token_ids or ()),
            send=send,
            guide=self._guide,
            live=bool(self.request.stream),
        )

    def _gain(self, index: int, piece: Piece) -> Gain:
        if piece.finish == "error":
            error = piece.error or "the output failed"
            status = 400 if error.startswith(CANNOT_BE_FOLLOWED) else 500
            raise Refused(status, error, code="output_failed")
        metrics, now = self._engine.metrics, time.perf_counter()
        if self.first is None:
            self.first = self._box.first - self.begun
            metrics.first.observe(self.first)
        self._tokens[index] += len(piece.tokens)
        stream, shown = self._texts[index], piece.tokens
        if piece.finish is not None:
            self.finishes[index] = piece.finish
            metrics.finished(piece.finish)
            metrics.whole.observe(now - self.begun)
            if self._tokens[index] > 1:
                waited = now - self.begun - self.first
                metrics.between.observe(waited / (self._tokens[index] - 1))
            if shown and shown[-1] in self._stop_tokens:
                shown = shown[:-1]
        text = stream.push(shown)
        if piece.finish is not None:
            text += stream.finish()
        return Gain(index, text, piece.tokens, piece.logprobs, piece.finish, piece.echoed)


def _sampling(engine: Engine, request: Common) -> Sampling | None:
    """How to draw tokens. Raises Refused where the bias of a token is none of the model's."""
    sampling = request.sampling()
    if sampling is not None and isinstance(sampling.logit_bias, LogitBias):
        try:
            sampling.logit_bias.check_vocabulary(engine.params.config.vocab_size)
        except ValueError as error:
            raise Refused(400, str(error), param="logit_bias") from None
    return sampling


def _room(engine: Engine, prompt: Sequence[int], new: int | None, param: str) -> int:
    """The most new tokens after a prompt. Raises Refused, about `param`, where they do not fit."""
    context, size = engine.plan.context, len(prompt)
    vocabulary = engine.params.config.vocab_size
    if size == 0:
        raise Refused(400, "a prompt is empty; it needs at least one token", param="prompt")
    if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
        message = f"a prompt holds token {wrong[0]}, outside the vocabulary of {vocabulary} entries"
        raise Refused(400, message, param="prompt")
    if size + (new or 1) > context:
        asked = f" and {new} new ones" if new else ""
        message = (
            f"the context has {context} tokens, and the request asks for {size + (new or 1)}: "
            f"{size} of the prompt{asked or ' and at least one new one'}"
        )
        raise Refused(400, message, param=param, code="context_length_exceeded")
    return context - size if new is None else new
