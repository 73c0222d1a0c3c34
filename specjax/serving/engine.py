"""The engine: one thread that owns the rows on the device.

Others give it outputs to make (`Ask`) and hear of every round (`Piece`). It admits prompts first
come, first served, runs a round of all rows, and tells whoever asked. All shapes are fixed when it
starts, and so are the programs: greedy, sampling, sampling with log-probabilities, and sampling
with penalties.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Literal, NamedTuple

import jax
import numpy as np

from specjax.generation.batch import Batch, Completion, empty_batch
from specjax.generation.batch_rows import CHUNK, Gained, Waiting
from specjax.generation.constraints import Guide
from specjax.generation.prefix_cache import PrefixCache
from specjax.generation.request import Request
from specjax.model.params import Params
from specjax.serving.errors import Busy, Ending
from specjax.serving.metrics import Metrics
from specjax.serving.requests import MOST_BIASES
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.penalties import LogitBias
from specjax.speculation.sampling import IDLE, Sampling

Finish = Literal["stop", "length", "error"]
_log = logging.getLogger(__name__)

_MOST_ROUNDS = 16  # that the device runs before the host looks
_MOMENT, _SHORT_MOMENT = 0.025, 0.005  # seconds of them; the short one where a row is free


@dataclasses.dataclass(frozen=True)
class Plan:
    """The room of an engine.

    rows: outputs made at a time.
    context: tokens of a prompt and its output.
    queue: outputs that may wait for a row.
    prefix_bytes: of what prompts that begin alike share; 0 for none.
    logprobs: the most probable tokens that one may ask for at each place.
    """

    rows: int = 8
    context: int = 2048
    queue: int = 64
    prefix_bytes: int = 2**28
    logprobs: int = 20


class Piece(NamedTuple):
    """The gain of an output in one round; `finish` is not None in its last piece.

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
    guide: of the grammar that it keeps to; None: it is free.
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

    def key(self) -> jax.Array:
        """The random key, [1]."""
        key = jax.random.key(self.seed)
        for number in self.folds:
            key = jax.random.fold_in(key, number)
        return key[None]

    def waiting(self, number: int) -> Waiting:
        """The prompt as a batch takes it."""
        limit = len(self.tokens) + self.max_new_tokens
        sampling = _arrays(self.sampling or Sampling(top_k=1))
        own = self.sampling
        return Waiting(
            number, self.tokens, limit, self.key(), sampling, self.guide, draws=own is not None,
            scores=self.scored, echoes=self.echoed, penalizes=own is not None and own.penalizes,
        )  # fmt: skip

    def end(self, output: list[int], new: int) -> int | None:
        """Where the output ends: the number of tokens up to the first of the last `new` ones that
        ends it."""
        if self.stop is None and not self.stop_tokens:
            return None
        lengths = range(len(output) - new + 1, len(output) + 1)
        return next((length for length in lengths if self._ended(output[:length])), None)

    def _ended(self, output: list[int]) -> bool:
        return output[-1] in self.stop_tokens or (self.stop is not None and self.stop(output))


def _arrays(sampling: Sampling) -> Sampling:
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


class Engine:
    """Makes outputs in a thread of its own.

    Args:
      params: the model.
      request: the drafter and the other options of all outputs.
      plan: what there is room for.
      metrics: is told what happens.

    Raises ValueError where the plan does not fit the model or the memory.
    """

    def __init__(self, params: Params, request: Request, plan: Plan, metrics: Metrics) -> None:
        self.plan, self.metrics, self.params = plan, metrics, params
        self._request = dataclasses.replace(request, logprobs=plan.logprobs)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._numbers, self._open = count(), dict[int, tuple[Ask, list[int]]]()
        self._lock, self._asked = threading.Lock(), 0
        self._draining = self._ended = False
        self._pace = _MOMENT  # seconds of a round
        self._batch = self._new_batch()
        self._thread = threading.Thread(target=self._work, name="specjax-engine", daemon=True)

    @property
    def running(self) -> int:
        """Outputs that have a row."""
        return len(self._batch.running)

    @property
    def open(self) -> int:
        """Outputs that are not finished."""
        return self._asked

    def cache_usage(self) -> float:
        """The share of all rows' tokens that are in use."""
        numbers = {prompt.number for prompt in list(self._batch.running.values())}
        used = sum(
            len(ask.tokens) + len(output)
            for number, (ask, output) in list(self._open.items())
            if number in numbers
        )
        return used / (self.plan.rows * self.plan.context)

    @property
    def draining(self) -> bool:
        """Whether new outputs are refused because the server ends."""
        return self._draining

    @property
    def prefixes(self) -> PrefixCache | None:
        """The chunks that prompts have in common."""
        return self._batch.prefixes

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The model's own tokens that end an output."""
        return self._request.stop_tokens

    @property
    def constrained(self) -> bool:
        """Whether outputs may keep to grammars."""
        return self._request.constrained

    def start(self) -> None:
        """Compiles every program but those of rows with a grammar, and begins to serve."""
        plain, penalizing = Sampling(), Sampling(presence_penalty=1.0)
        for sampling, scored in ((None, False), (plain, False), (plain, True), (penalizing, True)):
            self._warm_up(sampling, scored)
        self._renew()
        self._thread.start()

    def submit(self, asks: Sequence[Ask]) -> list[int]:
        """Takes outputs to make, all or none. Returns the numbers by which to cancel them.

        Raises Busy where too many wait, and Ending where the server ends.
        """
        with self._lock:
            if self._draining:
                raise Ending
            if self._asked + len(asks) > self.plan.rows + self.plan.queue:
                raise Busy(self.plan.queue)
            self._asked += len(asks)
            numbers = [next(self._numbers) for _ in asks]
            for number, ask in zip(numbers, asks, strict=True):
                self._inbox.put(partial(self._admit, number, ask))
        return numbers

    def cancel(self, numbers: Sequence[int]) -> None:
        """Gives up outputs; finished ones are none."""
        for number in numbers:
            self._inbox.put(partial(self._cancel, number))

    def drain(self) -> None:
        """Refuses new outputs from now on."""
        with self._lock:
            self._draining = True

    def stop(self) -> None:
        """Ends every open output with an error, and the thread."""
        self.drain()
        self._inbox.put(self._end)
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        try:
            while not self._ended:
                try:
                    self._turn()
                except Exception as error:
                    self._recover(error)
        finally:
            self.drain()
            while not self._inbox.empty():
                self._inbox.get()()
            self._fail("the server ends")

    def _turn(self) -> None:
        """Hears who asks and who goes, reads some of a prompt, and runs one round."""
        while not self._batch.busy or not self._inbox.empty():
            self._inbox.get()()
            if self._ended:
                return
        self._batch.fill()
        if self._batch.running:
            self._advance()

    def _advance(self) -> None:
        """Runs rounds for a moment, or until a row finishes, and tells who gained."""
        batch, running = self._batch, dict(self._batch.running)
        begin = time.perf_counter()
        gained = batch.steps(self._most_rounds(), _MOST_ROUNDS)
        self._pace = (time.perf_counter() - begin) / gained.counts.shape[1]
        rows, finished = list(running), batch.finished()
        self.metrics.verified(np.asarray(gained.drafted)[rows], np.asarray(gained.accepted)[rows])
        for row, prompt in running.items():
            completion = batch.take(row) if row in finished else None
            own = jax.tree.map(itemgetter(row), gained)
            self._tell(prompt.number, own, completion)

    def _most_rounds(self) -> int:
        """The rounds to run before anybody is heard or told: few where somebody may wait for it."""
        running = self._batch.running
        first = any(not self._open[prompt.number][1] for prompt in running.values())
        if first or self._batch.wanting:
            return 1
        moment = _MOMENT if len(running) == self.plan.rows else _SHORT_MOMENT
        return min(_MOST_ROUNDS, max(1, int(moment / self._pace)))

    def _tell(self, number: int, gained: Gained, completion: Completion | None) -> None:
        """Sends what one output gained in some rounds, in arrays [rounds, …], up to its end."""
        ask, output = self._open[number]
        valid = np.arange(gained.emitted.shape[1]) < gained.counts[:, None]
        tokens: list[int] = np.asarray(gained.emitted)[valid].tolist()
        output += tokens
        end, error = ask.end(output, len(tokens)), None
        finish: Finish | None = None
        if end is not None:
            tokens, finish = tokens[: end - len(output) + len(tokens)], "stop"
        elif completion is not None:
            error = completion.error
            stopped = bool(output) and output[-1] in self.stop_tokens
            finish = "error" if error else "stop" if stopped else "length"
        logprobs = None
        if ask.scored:
            logprobs = jax.tree.map(lambda leaf: leaf[valid][: len(tokens)], gained.logprobs)
        self.metrics.generated(len(tokens))
        piece = Piece(tokens, logprobs, finish, error, self._batch.echoed.pop(number, None))
        if finish is None:
            ask.send(piece)
        else:
            self._batch.drop(number)
            self._close(number, piece)

    def _admit(self, number: int, ask: Ask) -> None:
        self._open[number] = ask, []
        self.metrics.asked(len(ask.tokens))
        self._batch.waiting.append(ask.waiting(number))

    def _cancel(self, number: int) -> None:
        if number in self._open:
            self._batch.drop(number)
            self._close(number, None)

    def _close(self, number: int, piece: Piece | None) -> None:
        ask, _ = self._open.pop(number)
        with self._lock:
            self._asked -= 1
        if piece is not None:
            ask.send(piece)

    def _end(self) -> None:
        self._ended = True

    def _fail(self, reason: str) -> None:
        for number in list(self._open):
            self._close(number, Piece([], None, "error", reason))

    def _recover(self, error: Exception) -> None:
        """Ends every open output with an error, and begins with rows that hold nothing."""
        _log.error("the engine failed and starts anew", exc_info=error)
        self.metrics.failed()
        self._fail(f"the engine failed ({type(error).__name__}) and starts anew: ask again")
        self._renew()

    def _renew(self) -> None:
        """Begins with rows that hold nothing, once the memory of the old ones is free."""
        for leaf in jax.tree.leaves(self._batch.state.cache):
            leaf.delete()
        self._batch = self._new_batch()

    def _new_batch(self) -> Batch:
        plan = self.plan
        shared = plan.prefix_bytes and self.params.mesh is None
        on_cpu = jax.default_backend() == "cpu"
        prefixes = PrefixCache(plan.prefix_bytes, outputs=on_cpu) if shared else None
        return empty_batch(
            self.params, self._request, plan.rows, plan.context,
            sampling=_arrays(Sampling()), prefixes=prefixes,
        )  # fmt: skip

    def _warm_up(self, sampling: Sampling | None, scored: bool) -> None:
        """Runs everything once: a chunk that is read, one that an output fills, one that is found,
        a prompt that is scored, and an output that is given up."""
        lengths = [CHUNK, 2 * CHUNK + 2, 2 * CHUNK + 2, CHUNK, 2]
        scoring, given_up = len(lengths) - 2, len(lengths) - 1
        for number, length in enumerate(lengths):
            text = int(number == 0)  # the first has nothing in common with the others
            tokens = np.full(min(length, self.plan.context - 2), text, np.int32)
            echoed = scored and number == scoring
            ask = Ask(
                tokens, 2, sampling, 2**32 - 1, (0, 1), scored, echoed, None, frozenset(), _ignore
            )
            self._batch.waiting.append(ask.waiting(number))
        while self._batch.busy:
            self._batch.fill()
            if any(prompt.number == given_up for prompt in self._batch.running.values()):
                self._batch.drop(given_up)
            elif self._batch.running:
                self._batch.steps(1, _MOST_ROUNDS)
                for row in self._batch.finished():
                    self._batch.take(row)


def _ignore(_: Piece) -> None:
    """Nobody hears of outputs that are made before the start."""
