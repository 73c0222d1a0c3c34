"""Continuous batching: many prompts through a fixed number of rows.

A row that finishes gets the next prompt at once, first come, first served (ORCA, Yu et al. 2022;
QSpec's evaluation works this way). Rounds of the whole batch are compiled once. A prompt is read in
chunks of one fixed size, a few between two rounds, so that running rows wait little. A row's output
depends neither on its neighbours nor on when it began: it equals that of decoding the prompt alone.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Activation
from specjax.checks import check_integer, shown
from specjax.generation.batch_rows import (
    CHUNK,
    Job,
    PromptReading,
    admit,
    empty_rows,
    end_row,
    open_prompt,
    read_chunk,
    run_rounds,
)
from specjax.generation.decoding import failure
from specjax.generation.prompts import check_ids, normalize_prompt
from specjax.generation.request import Options, Request, row_keys
from specjax.model.parallel import check_rows, readable, whole_rows
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState, Stats

_CHUNKS = 4  # at most, for every row without a prompt, while the others wait for their next round
_ROUNDS = 64  # at most, before the host is told how far the rows are

StopWhen = Callable[[int, list[int]], bool]


@dataclasses.dataclass(frozen=True)
class Completion:
    """The result of one prompt.

    tokens: int32[n], the prompt included; int32[0] where the prompt was refused.
    stats: counts, int32[] each.
    levels: counts of the levels that drafted; see `DecodeResult`.
    error: why the prompt was refused, or why its output ended early: the model's next logits were
        NaN or infinite. None: neither.
    """

    tokens: np.ndarray
    stats: Stats
    levels: tuple[Stats, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is.

    done, total: prompts.
    generated: tokens.
    accepted, drafted: drafts.
    useful_rounds: rounds of rows that had a prompt.
    row_rounds: rounds of all rows.
    """

    done: int
    total: int
    generated: int
    accepted: int
    drafted: int
    useful_rounds: int
    row_rounds: int


def decode_many(
    params: Params,
    prompts: Iterable[Sequence[int]],
    *,
    rows: int = 8,
    max_new_tokens: int = 64,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_capacity: int | None = None,
    cache_bits: int = 16,
    activation: Activation = "a16",
    stop_when: StopWhen | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Completion]:
    """Decodes any number of prompts; the results are in their order.

    Args:
      params: the model.
      prompts: token ids of every prompt. One that is not a list of token ids, or does not fit, is
        reported in its `error`, and the others go on.
      rows: prompts decoded at a time; under a mesh a multiple of its data axis.
      max_new_tokens: the most tokens to generate per prompt.
      drafter: proposes tokens; default QSpec().
      sampling: draws tokens; None: the greedy choice.
      key: a random key, from which prompt i gets fold_in(key, i), or one per prompt.
      stop_tokens: tokens that end a prompt's output; None: the model's own; () for none.
      cache_capacity: KV slots per row; None: as many as the longest prompt needs.
      cache_bits: bits per cache entry: 16, 8 or 4.
      activation: activation precision of the model itself, prompts included. "a8" and "a4" are for
        comparison: their output is what QSpec would draft without verification.
      stop_when: called after every round with the number of a prompt and its output so far, token
        ids. True ends the output with the first token for which it is true; once true, it must
        stay true. `specjax.generation.text.StopStrings` makes one from texts.
      progress: called after every few rounds.

    Returns:
      One `Completion` per prompt.

    Raises:
      ValueError: there are no prompts, or an argument is out of its range.
    """
    prompts = _listed(prompts)
    finished = complete(
        params, prompts, rows=rows, max_new_tokens=max_new_tokens, drafter=drafter,
        sampling=sampling, key=key, stop_tokens=stop_tokens, cache_capacity=cache_capacity,
        cache_bits=cache_bits, activation=activation, stop_when=stop_when, progress=progress,
    )  # fmt: skip
    by_number = dict(finished)
    return [by_number[index] for index in range(len(prompts))]


def complete(
    params: Params,
    prompts: Iterable[Sequence[int]],
    *,
    rows: int = 8,
    key: jax.Array | None = None,
    stop_when: StopWhen | None = None,
    progress: Callable[[Progress], None] | None = None,
    **options: Unpack[Options],
) -> Iterator[tuple[int, Completion]]:
    """`decode_many` as an iterator: yields each prompt's number and `Completion` once it is
    finished."""
    request = Request.make(params, **options)
    if check_integer("rows", rows) < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    check_rows(params.mesh, rows)
    prompts = _listed(prompts)
    accepted, refused = _check_prompts(params, request, prompts)
    keys = row_keys(request.sampling, key, len(prompts))
    yield from refused.items()
    if accepted:
        width = max(len(tokens) for tokens in accepted.values())
        rows = min(rows, whole_rows(params.mesh, len(accepted)))
        job = Job(params, request.for_width(params, width, rows), -(-width // CHUNK) * CHUNK)
        yield from _serve(job, accepted, keys, rows, len(refused), stop_when, progress)


def _serve(
    job: Job,
    prompts: dict[int, np.ndarray],
    keys: jax.Array | None,
    rows: int,
    refused: int,
    stop_when: StopWhen | None,
    progress: Callable[[Progress], None] | None,
) -> Iterator[tuple[int, Completion]]:
    """The loop on the host: reads chunks of the next prompts, runs rounds, yields what has
    finished."""
    queue = deque(prompts)
    state = empty_rows(job, rows, keys)
    running: dict[int, int] = {}  # row -> its prompt's number
    totals = Progress(refused, len(prompts) + refused, 0, 0, 0, 0, 0)
    coming: PromptReading | None = None
    while queue or coming or running:
        for _ in range(_CHUNKS * (rows - len(running))):
            if coming is None:
                if not queue or len(running) == rows:
                    break
                number = queue.popleft()
                coming = open_prompt(job, number, prompts[number])
            coming = read_chunk(job, coming)
            if coming.done == len(coming.tokens) - 1:
                row = next(row for row in range(rows) if row not in running)
                state = admit(job, state, coming, row, keys)
                running[row], coming = coming.number, None
        if running:
            waiting = coming is not None or (queue and len(running) < rows)
            limit = 1 if waiting or stop_when is not None else _ROUNDS
            state, totals = _run_rounds(job, state, totals, limit)
            finished = np.asarray(readable(state.finished, job.params.mesh))
            ends = _ends(job, state, prompts, running, stop_when)
            for row in [row for row in running if finished[row] or row in ends]:
                completion = _completion(job, state, row, ends.get(row))
                if not finished[row]:
                    state = end_row(state, np.int32(row), job.params.mesh)
                totals = _add(totals, completion)
                yield running.pop(row), completion
            if progress is not None:
                progress(totals)


def _run_rounds(
    job: Job, state: DecodeState, totals: Progress, limit: int
) -> tuple[DecodeState, Progress]:
    before = int(jnp.sum(state.stats.rounds))
    state, rounds = run_rounds(job.params, job.request, state, np.int32(limit))
    totals = dataclasses.replace(
        totals,
        useful_rounds=totals.useful_rounds + int(jnp.sum(state.stats.rounds)) - before,
        row_rounds=totals.row_rounds + int(rounds) * state.finished.shape[0],
    )
    return state, totals


def _ends(
    job: Job,
    state: DecodeState,
    prompts: dict[int, np.ndarray],
    running: dict[int, int],
    stop_when: StopWhen | None,
) -> dict[int, int]:
    """Returns the rows that `stop_when` ends, with their lengths in tokens, the prompt included."""
    if stop_when is None:
        return {}
    tokens, lengths = map(np.asarray, readable((state.tokens, state.lengths), job.params.mesh))
    ends = {}
    for row, number in running.items():
        begin = len(prompts[number])
        output = tokens[row, begin : lengths[row]].tolist()
        if stop_when(number, output):
            counts = range(1, len(output))
            ends[row] = begin + 1 + bisect.bisect_left(
                counts, True, key=lambda count: stop_when(number, output[:count])
            )  # fmt: skip
    return ends


def _completion(job: Job, state: DecodeState, row: int, end: int | None) -> Completion:
    """Returns what a row holds, or its first `end` tokens."""
    levels = job.request.drafter.levels(state.draft)
    tokens, length, stats, failed, levels = jax.tree.map(
        lambda leaf: np.asarray(leaf[row]),
        readable((state.tokens, state.lengths, state.stats, state.failed, levels), job.params.mesh),
    )
    if end is not None:
        stats = dataclasses.replace(stats, generated=stats.generated - (length - end))
        return Completion(tokens[:end], stats, levels)
    error = failure(int(stats.generated)) if failed else None
    return Completion(tokens[:length], stats, levels, error)


def _add(totals: Progress, completion: Completion) -> Progress:
    stats = completion.stats
    return dataclasses.replace(
        totals,
        done=totals.done + 1,
        generated=totals.generated + int(stats.generated),
        accepted=totals.accepted + int(stats.accepted),
        drafted=totals.drafted + int(stats.drafted),
    )


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
            accepted[index] = np.asarray(tokens[0])
        except ValueError as error:
            none = jax.tree.map(lambda counts: np.asarray(counts[0]), Stats.zeros(1))
            refused[index] = Completion(np.zeros(0, np.int32), none, error=str(error))
    return accepted, refused
