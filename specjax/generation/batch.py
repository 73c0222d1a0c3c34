"""A continuous batch, as the host sees it: prompts that wait, one that is being read, and rows.

Whoever drives a batch fills its free rows, runs rounds, and takes out the rows that are finished
or that nobody wants any longer.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from specjax.checks import check_integer, shown
from specjax.generation.batch_rows import (
    Gained,
    Job,
    PromptReading,
    Waiting,
    admit,
    empty_rows,
    end_row,
    open_prompt,
    read_chunk,
    run_rounds,
)
from specjax.generation.completion import Completion, completed, refusal
from specjax.generation.constraints import Guide
from specjax.generation.guided import Constraints, guided_round, open_guides
from specjax.generation.kinds import Kind, Scope, less_of
from specjax.generation.prefix_cache import PrefixCache, begin_alike
from specjax.generation.programs import Programs
from specjax.generation.prompts import check_ids, normalize_prompt
from specjax.generation.request import Request, row_keys, row_sampling, threefry
from specjax.generation.rows import widened
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import check_rows, readable, whole_rows
from specjax.model.params import Params
from specjax.speculation.first_rows import move_row
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState

Values = TypeVar("Values")  # a tree of arrays
Result = TypeVar("Result")

_CHUNKS = 4  # at most, for every row without a prompt, while the others wait for their next round


class Launched(NamedTuple):
    """Rounds that the device runs.

    rounds: their number, int32[].
    each: the gains of the first of them, in arrays [rows that run, room, …].
    """

    rounds: jax.Array | int
    each: Gained

    def gained(self) -> Gained:
        """Waits for the device. Returns what the rows gained, in arrays [rows, rounds, …]."""
        rounds = int(self.rounds)
        told: Gained = jax.tree.map(lambda leaf: np.asarray(leaf)[:, :rounds], self.each)
        return told


class Batch:
    """Rows on the device, and the prompts that go through them, first come, first served.

    Args:
      job: what all prompts share.
      rows: prompts decoded at a time.
      like: a prompt that lends free rows its key and its sampling; it is not decoded.
      prefixes: what prompts that begin alike share; None: every prompt is read whole.
      programs: those of rounds; None: each is compiled by its first round.
      requests: the request for each number of rows that may run; None: all rows always run.
      told: hears of every call that others than the batch itself make, by its name and arguments,
        before it is made: all hosts of a mesh must make the same ones.

    waiting: prompts that nobody has read yet. More may be appended at any time between two calls.
    running: the prompts in the rows, by row.
    state: the rows.
    echoed: log-probabilities of prompts' own tokens but the first, by the prompts' numbers; whoever
        asked for them takes them out.
    requests: by numbers of rows that may run.
    lacking: the scope of the last rounds, where a greater one had to serve; else None.
    """

    def __init__(
        self, job: Job, rows: int, like: Waiting, prefixes: PrefixCache | None = None,
        programs: Programs | None = None, requests: Mapping[int, Request] | None = None,
        told: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        self.job, self.prefixes, self._rows = job, prefixes, rows
        self._programs, self._told = programs or Programs(), told or (lambda *call: None)
        self.requests = requests or {rows: job.request}
        self.lacking: Scope | None = None
        self.waiting: deque[Waiting] = deque()
        self.running: dict[int, Waiting] = {}
        self._guides: dict[int, Guide] = {}
        self.state = empty_rows(job, rows, like)
        self.echoed: dict[int, Logprobs] = {}
        self._coming: PromptReading | None = None
        self._spare: KVCache | None = None  # of one row: the next prompt is read into it

    @property
    def busy(self) -> bool:
        """Whether any prompt is not finished."""
        return bool(self.waiting or self._coming or self.running)

    @property
    def wanting(self) -> bool:
        """Whether a free row will get a prompt that must be read first."""
        return self._coming is not None or bool(self.waiting and len(self.running) < self._rows)

    def add(self, prompt: Waiting) -> None:
        """Takes a prompt, which waits for a row."""
        self._told("add", prompt)
        self.waiting.append(prompt)

    def fill(self) -> None:
        """Reads a few chunks of the next prompts, and puts what has been read into free rows."""
        self._told("fill")
        for _ in range(_CHUNKS * (self._rows - len(self.running))):
            if self._coming is None:
                if not self.waiting or len(self.running) == self._rows:
                    return
                self._coming = self._open(self.waiting.popleft())
            self._coming = self._read(self._coming)
            if not self._coming.unread:
                row = next(row for row in range(self._rows) if row not in self.running)
                self.state, self._spare = admit(self.job, self.state, self._coming, row)
                self._echo(self._coming)
                prompt, self._coming = self._coming.prompt, None
                self.running[row] = prompt
                if prompt.guide is not None:
                    self._guides[row] = prompt.guide.copy()

    def run(self, limit: int) -> int:
        """Runs rounds until a row finishes, at most `limit`. Returns their number."""
        return int(self.launch(limit, 0).rounds)

    def steps(self, limit: int = 1, room: int = 1) -> Gained:
        """Runs rounds until a row finishes, at most `limit`. Returns what the rows gained, in
        arrays [rows, rounds, …] on the host.

        room: the most rounds that `limit` ever is. Each has a program of its own.
        """
        return self.launch(limit, room).gained()

    @property
    def guided_now(self) -> bool:
        """Whether a row keeps to a grammar, so that the host takes part in every round."""
        return bool(self._guides)

    def launch(self, limit: int, room: int) -> Launched:
        """Begins to run rounds as `steps` does, and does not wait for the device: all that is done
        to the batch from now on is done after them."""
        self._told("launch", limit, room)
        self._close_gaps()
        wanted = self._scope()
        scope, ahead = self._programs.least(wanted), self._programs.ahead
        self.lacking = None if scope == wanted else wanted
        params, request = self.job.params, self.requests[scope.rows]

        def run(state: DecodeState) -> tuple[DecodeState, Launched]:
            if scope.guided:
                state, verified = guided_round(
                    params, request, state, self._guides, ahead, scope.rows
                )
                gained = Gained.of(verified)
                gained = jax.tree.map(lambda leaf: np.asarray(leaf)[:, None], gained)
                return state, Launched(1, gained)
            state, rounds, gained = ahead.run(
                run_rounds, params, request, state, np.int32(limit), told=room, rows=scope.rows
            )
            return state, Launched(rounds, readable(gained, params.mesh) if room else gained)

        return self._advance(run, scope.kind)

    def finished(self) -> list[int]:
        """The rows whose prompts are finished, or cannot go on."""
        self._told("finished")
        return self._finished()

    def _finished(self) -> list[int]:
        finished = np.asarray(readable(self.state.finished, self.job.params.mesh))
        return [row for row in self.running if finished[row] or self._error(row)]

    def take(self, row: int, end: int | None = None) -> Completion:
        """Frees a row. Returns what it holds, or its first `end` tokens."""
        self._told("take", row, end)
        completion = completed(self.job.params, self.job.request, self.state, row, end)
        error = self._error(row)
        if error is not None:
            completion = dataclasses.replace(completion, error=error)
        self._free(row)
        return completion

    def drop(self, number: int) -> None:
        """Forgets a prompt that waits, is being read, or is in a row. An unknown number is none."""
        self._told("drop", number)
        self.waiting = deque(prompt for prompt in self.waiting if prompt.number != number)
        self.echoed.pop(number, None)
        if self._coming is not None and self._coming.prompt.number == number:
            self._spare, self._coming = self._coming.cache, None
        for row in [row for row, prompt in self.running.items() if prompt.number == number]:
            self._free(row)

    def _free(self, row: int) -> None:
        if self.prefixes is not None and self.prefixes.outputs:
            state = self.state
            tokens, cached = (
                np.asarray(state.tokens)[row],
                int(np.asarray(state.cache.lengths)[row]),
            )
            self.prefixes.keep_row(state.cache, row, tokens[:cached])
        if row not in self._finished() or self._error(row) is not None:
            self.state = end_row(self.state, np.int32(row), self.job.params.mesh)
        del self.running[row]
        self._guides.pop(row, None)

    def _open(self, prompt: Waiting) -> PromptReading:
        """Begins to read a prompt, behind what another prompt had in common with it."""
        reading, self._spare = open_prompt(self.job, prompt, self._spare), None
        if self.prefixes is None or prompt.echoes:  # what is not read again is not scored
            return reading
        return self.prefixes.resume(reading)

    def _echo(self, reading: PromptReading) -> None:
        """Hands out the log-probabilities of a prompt that has been read."""
        if reading.prompt.echoes:
            none = jax.tree.map(
                lambda leaf: np.asarray(leaf[0]),
                Logprobs.zeros(1, 0, self.job.request.logprobs or 0),
            )
            self.echoed[reading.prompt.number] = jax.tree.map(
                lambda *parts: np.concatenate(parts), none, *reading.scores
            )

    def _read(self, reading: PromptReading) -> PromptReading:
        after = read_chunk(self.job, reading)
        if self.prefixes is not None:
            self.prefixes.keep(after, reading.done)
        return after

    def _advance(
        self, program: Callable[[DecodeState], tuple[DecodeState, Result]], kind: Kind
    ) -> Result:
        """Runs a program on the state without what its kind does not compute: it costs less."""
        before = self.state
        less = less_of(before, kind)
        after, result = program(dataclasses.replace(before, **less))
        aside: dict[str, Any] = {name: getattr(before, name) for name in less}
        if after.sampling is not None and before.sampling is not None:  # parts of it ran, donated
            aside["sampling"] = after.sampling.filled_from(before.sampling)
        self.state = dataclasses.replace(after, **aside)
        return result

    def _scope(self) -> Scope:
        """The least scope of rounds that gives every running prompt what it asks for."""
        kind = max(prompt.kind for prompt in self.running.values())
        return Scope(self._first(max(self.running) + 1), kind, bool(self._guides))

    def _first(self, rows: int) -> int:
        """How many rows run so that the first `rows` do."""
        return min(each for each in self.requests if each >= rows)

    def _close_gaps(self) -> None:
        """Moves the last rows to free places where fewer rows run then, unless a prompt comes."""
        while not self.wanting and self._first(len(self.running)) < self._first(
            max(self.running) + 1
        ):
            source = max(self.running)
            target = next(row for row in range(self._rows) if row not in self.running)
            self.state = move_row(self.state, np.int32(source), np.int32(target))
            self.running[target] = self.running.pop(source)
            if source in self._guides:
                self._guides[target] = self._guides.pop(source)

    def _error(self, row: int) -> str | None:
        """Why the row's grammar cannot be followed any further; None: it can, or there is none."""
        return self._guides[row].error if row in self._guides else None


def open_batch(
    params: Params,
    request: Request,
    prompts: Iterable[Sequence[int]],
    rows: int,
    key: jax.Array | None,
    constraint: Constraints = None,
    share: bool = True,
) -> tuple[Batch | None, dict[int, Completion]]:
    """Checks the arguments and the prompts, as `complete` has them.

    Returns the batch, None if there is nothing to decode, and the errors of the prompts that cannot
    be decoded, by their numbers.
    """
    if check_integer("rows", rows) < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    check_rows(params.mesh, rows)
    listed = _listed(prompts)
    accepted, refused = _check_prompts(params, request, listed)
    new = request.max_new_tokens
    keys = row_keys(request.sampling, key, len(listed))
    sampling = jax.tree.map(np.asarray, row_sampling(request.sampling, len(listed)))
    guides = open_guides(params, request, constraint, len(listed))
    if not accepted:
        return None, refused
    width = max(len(tokens) for tokens in accepted.values())
    rows = min(rows, whole_rows(params.mesh, len(accepted)))
    if share and len(accepted) > 1:
        request = request.sharing(params)
    request, width = widened(params, request, width, rows)
    job = Job(params, dataclasses.replace(request, sampling=None), width)
    waiting = [
        Waiting(
            number, tokens, len(tokens) + new, *_of_prompt((keys, sampling), number), guides[number]
        )
        for number, tokens in accepted.items()
    ]
    shared = params.mesh is None and begin_alike(accepted.values())
    batch = Batch(job, rows, waiting[0], PrefixCache() if shared else None)
    batch.waiting.extend(waiting)
    return batch, refused


def empty_batch(
    params: Params,
    request: Request,
    rows: int,
    context: int,
    *,
    sampling: Sampling | None = None,
    prefixes: PrefixCache | None = None,
    programs: Programs | None = None,
    told: Callable[..., None] | None = None,
) -> Batch:
    """Returns a batch without prompts; they are added as they come.

    Args:
      params: the model.
      request: the options that all prompts share. Each prompt has its own limit and sampling; those
        of the request do not count.
      rows: prompts decoded at a time.
      context: tokens of a prompt and its output, at most.
      sampling: in arrays [1], of fields like every prompt's; None: all are decoded greedily.
      prefixes, programs, told: as in `Batch`. One device runs no more rows than a power of two
        needs.

    Raises ValueError where the rows do not fit the model or the memory.
    """
    request = dataclasses.replace(request, max_new_tokens=1, sampling=None)
    counts = [rows] if params.mesh is not None else [*_powers_below(rows), rows]
    requests = request.sharing(params).for_row_counts(params, context - 1, counts)
    key = None if sampling is None else threefry(jax.random.key(0))[None]
    like = Waiting(-1, np.zeros(1, np.int32), 2, key, sampling)
    job = Job(params, requests[rows], context - 1)
    return Batch(job, rows, like, prefixes, programs, requests, told)


def _powers_below(rows: int) -> list[int]:
    """1, 2, 4, … below `rows`."""
    return [1 << power for power in range((rows - 1).bit_length())]


def _of_prompt(values: Values, number: int) -> Values:
    """Returns one prompt's entries of arrays [P], as arrays [1]."""
    own: Values = jax.tree.map(lambda leaf: leaf[number : number + 1], values)
    return own


def _listed(prompts: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """Returns prompts that may come one by one. Raises ValueError where there are none."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes):
        raise ValueError(f"prompts must be lists of token ids, got {shown(prompts)}")
    listed = list(prompts)
    if not listed:
        raise ValueError("prompts must hold at least one prompt, got none")
    return listed


def _check_prompts(
    params: Params, request: Request, prompts: list[Sequence[int]]
) -> tuple[dict[int, np.ndarray], dict[int, Completion]]:
    """Returns the prompts that can be decoded, and the errors of the others, by their numbers."""
    accepted, refused = {}, {}
    request.slots(params.config, 1)
    for index, prompt in enumerate(prompts):
        try:
            tokens, _ = normalize_prompt(np.array(check_ids(prompt)), None, params.config)
            request.slots(params.config, tokens.shape[1])
            accepted[index] = np.asarray(tokens)[0]
        except ValueError as error:
            refused[index] = refusal(str(error))
    return accepted, refused
