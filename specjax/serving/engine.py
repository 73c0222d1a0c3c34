"""The engine: one thread that owns the rows on the device.

Others give it outputs to make (`Ask`) and hear of every round (`Piece`). It admits prompts first
come, first served, runs rounds, and tells whoever asked. All shapes are fixed when it starts. It
starts with the program that serves every output without a grammar. Those that cost less, because
fewer rows run or nobody asks for more, are compiled beside it once they are of use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.generation.batch import Batch, Launched, empty_batch
from specjax.generation.batch_rows import Gained, Waiting
from specjax.generation.completion import Completion
from specjax.generation.kinds import Kind, Scope
from specjax.generation.prefix_cache import PrefixCache
from specjax.generation.programs import Programs, shapes_of
from specjax.generation.request import Request
from specjax.model.params import Params
from specjax.serving.asks import Ask, Finish, Piece, Plan, arrays_of
from specjax.serving.compiler import Compiler
from specjax.serving.errors import Busy, Ending, HostGoneError
from specjax.serving.metrics import Metrics
from specjax.serving.warm_up import MOST_ROUNDS, warm_up
from specjax.speculation.sampling import Sampling

_log = logging.getLogger(__name__)

# Seconds of them: where somebody waits for each token, where a row is free, and else.
_MOMENT, _SHORT_MOMENT, _LONG_MOMENT = 0.05, 0.015, 0.25


class _Moment(NamedTuple):
    """Rounds that the device runs, the rows that were taken when they began, and when that was."""

    rounds: Launched
    running: dict[int, Waiting]
    begun: float


class Engine:
    """Makes outputs in a thread of its own.

    Args:
      params: the model.
      request: the drafter and the other options of all outputs.
      plan: what there is room for.
      metrics: is told what happens.
      told: hears what is done to the rows, as `Batch` tells it, and "renew" where all are given up.

    gone: the error that ended the engine, such as another host of the mesh that is gone.

    Raises ValueError where the plan does not fit the model or the memory.
    """

    def __init__(
        self, params: Params, request: Request, plan: Plan, metrics: Metrics,
        told: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.metrics, self.params = plan, metrics, params
        self._told = told
        self.gone: BaseException | None = None
        self._request = dataclasses.replace(request, logprobs=plan.logprobs)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._numbers, self._open = count(), dict[int, tuple[Ask, list[int]]]()
        self._lock, self._asked = threading.Lock(), 0
        self._draining = self._ended = False
        self._programs, self._held = Programs(MOST_ROUNDS), list[Waiting]()
        self._compiler = Compiler(self._compile, self._compiled)
        self._pace = _MOMENT  # seconds of a round
        self._moment: _Moment | None = None
        self._batch = self._new_batch()
        self._shapes = shapes_of(self._batch.state)
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
    def compiling(self) -> int:
        """Programs that would make rounds cost less, and are being compiled."""
        return self._compiler.open

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
        """Compiles a program that serves every output without a grammar, and begins to serve.

        The first output with a grammar has its program compiled, and waits; the others go on.
        """
        plain, one_device = Sampling(), self.params.mesh is None
        if one_device:
            self._compile(self._every(guided=False))
        warm_up(self._batch, self.plan.context, Sampling(presence_penalty=1.0), scored=True)
        if not one_device:  # the others of a divided model's programs are not compiled beside it
            for sampling, scored in ((plain, True), (plain, False), (None, False)):
                warm_up(self._batch, self.plan.context, sampling, scored)
        self._renew()
        self._thread.start()
        self._compiler.start()
        if one_device:
            for kind in (Kind.DRAWN, Kind.GREEDY):  # what one client alone is likely to ask for
                self._compiler.ask(Scope(1, kind))

    def follow(self, calls: Iterable[Sequence[Any]]) -> None:
        """Does to its own rows what the first host's engine does, instead of serving."""
        for name, *arguments in calls:
            if name == "renew":
                self._renew()
            else:
                getattr(self._batch, name)(*arguments)
            self._batch.echoed.clear()  # nobody asks here

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
        self._programs.ahead.end()
        self._compiler.end()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        try:
            while not self._ended:
                try:
                    self._turn()
                except HostGoneError:
                    raise
                except BaseException as error:  # a panic in llguidance's Rust is no Exception
                    self._recover(error)
        except BaseException as error:
            self.gone, self._moment = error, None
        finally:
            self.drain()
            while not self._inbox.empty():
                with contextlib.suppress(BaseException):  # rows may be gone; all must be told
                    self._inbox.get()()
            self._fail("the server ends")
            if self._moment is not None:
                jax.block_until_ready(self._moment.rounds.each)  # a process must not end before

    def _turn(self) -> None:
        """Hears who asks and who goes, reads some of a prompt, and runs one round."""
        while not self._batch.busy or not self._inbox.empty():
            if not self._batch.busy:
                self._moment = None  # whom it was for has gone
            self._inbox.get()()
            if self._ended:
                return
        self._batch.fill()
        if self._batch.running:
            self._advance()

    def _advance(self) -> None:
        """Runs rounds for a moment, or until a row finishes, and tells who gained.

        While it tells them, the device runs the next rounds, unless somebody comes or goes.
        """
        batch = self._batch
        moment = self._moment or self._begin_moment()
        gained = moment.rounds.gained()
        self._pace = (time.perf_counter() - moment.begun) / gained.counts.shape[1]
        finished = batch.finished()
        awaited = finished or batch.wanting or batch.guided_now or not self._inbox.empty()
        self._moment = None if awaited else self._begin_moment()
        # Who has gone since these rounds began is not told of them.
        running = {row: p for row, p in moment.running.items() if p.number in self._open}
        rows = list(running)
        self.metrics.verified(np.asarray(gained.drafted)[rows], np.asarray(gained.accepted)[rows])
        for row, prompt in running.items():
            completion = batch.take(row) if row in finished else None
            own = jax.tree.map(itemgetter(row), gained)
            self._tell(prompt.number, own, completion)

    def _begin_moment(self) -> _Moment:
        """Begins to run rounds, and does not wait for them."""
        launched = self._batch.launch(self._most_rounds(), MOST_ROUNDS)
        if self._batch.lacking is not None:
            self._compiler.ask(self._batch.lacking)
        return _Moment(launched, dict(self._batch.running), time.perf_counter())

    def _most_rounds(self) -> int:
        """The rounds to run before anybody is heard or told: few where somebody may wait for it."""
        running = [self._open[prompt.number] for prompt in self._batch.running.values()]
        watched = [output for ask, output in running if ask.watched]
        if self._batch.wanting or not all(watched):  # some have no token yet
            return 1
        moment = _LONG_MOMENT if not watched else _MOMENT
        if len(running) < self.plan.rows:
            moment = _SHORT_MOMENT
        return min(MOST_ROUNDS, max(1, int(moment / self._pace)))

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
        prompt = ask.waiting(number)
        every = self._every(guided=True)
        if ask.guide is None or self._programs.have(every):
            self._batch.add(prompt)
            return
        if not self._held:
            self._compiler.ask_again(every)
        self._held.append(prompt)

    def _every(self, guided: bool) -> Scope:
        """The scope of the programs that serve every output, without a grammar or with one."""
        return Scope(self.plan.rows, Kind.PENALIZED, guided)

    def _compile(self, scope: Scope) -> None:
        request = self._batch.requests[scope.rows]
        self._programs.compile(self.params, request, self._shapes, scope)

    def _compiled(self, scope: Scope, error: Exception | None) -> None:
        """Hears from the compiler's thread."""
        if scope == self._every(guided=True):
            self._inbox.put(partial(self._give_up_held, error) if error else self._release)

    def _give_up_held(self, error: Exception) -> None:
        """Ends the outputs that wait for programs; the next one has them compiled again."""
        reason = f"the programs of grammars cannot be compiled ({type(error).__name__})"
        for number in [each.number for each in self._held if each.number in self._open]:
            self._close(number, Piece([], None, "error", reason))
        self._held = []

    def _release(self) -> None:
        """Lets the outputs with a grammar wait for rows, like the others."""
        for prompt in self._held:
            if prompt.number in self._open:
                self._batch.add(prompt)
        self._held = []

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

    def _recover(self, error: BaseException) -> None:
        """Ends every open output with an error, and begins with rows that hold nothing."""
        _log.error("the engine failed and starts anew", exc_info=error)
        self.metrics.failed()
        self._fail(f"the engine failed ({type(error).__name__}) and starts anew: ask again")
        self._renew()

    def _renew(self) -> None:
        """Begins with rows that hold nothing, once the memory of the old ones is free."""
        if self._told is not None:
            self._told("renew")
        self._moment = None
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
            sampling=arrays_of(Sampling()), prefixes=prefixes, programs=self._programs,
            told=self._told,
        )  # fmt: skip
