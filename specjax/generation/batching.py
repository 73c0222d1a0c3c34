"""Continuous batching: many prompts through a fixed number of rows.

A row that finishes is given the next prompt at once, first come, first served (ORCA, Yu et al.
2022; QSpec's evaluation runs so). Rounds of the whole batch are compiled once; a prompt is read in
chunks of one fixed size, few between two rounds, so that running rows wait little. A row's output
depends neither on its neighbours nor on when it began: it is that of decoding the prompt alone.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Activation, check_activation
from pallas_kernels.cache_entries import check_cache_bits
from specjax.checks import check_integer
from specjax.drafting import QSpec
from specjax.generation.batch_rows import (
    CHUNK,
    Prefill,
    Run,
    admit,
    empty_rows,
    end_row,
    one_row,
    read_chunk,
    run_rounds,
)
from specjax.generation.decoding import check_types, row_keys
from specjax.generation.prompts import check_limits, check_stop_tokens, normalize_prompt
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
    """What came of one prompt.

    tokens: int32[n], the prompt included; the prompt alone where there was an error.
    stats: counts, int32[] each.
    levels: counts of the levels that drafted; see `DecodeResult`.
    error: why the prompt could not be decoded, or None.
    """

    tokens: np.ndarray
    stats: Stats
    levels: tuple[Stats, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is: prompts done and in all, tokens generated, drafts accepted and made, and
    the rows' rounds that were of use, and all."""

    done: int
    total: int
    generated: int
    accepted: int
    drafted: int
    useful_rounds: int
    row_rounds: int


def decode_many(
    params: Params, prompts: Sequence[Sequence[int]], **options: Any
) -> list[Completion]:
    """Decodes any number of prompts; the results are in their order. See `complete`."""
    finished = dict(complete(params, prompts, **options))
    return [finished[index] for index in range(len(prompts))]


def complete(
    params: Params,
    prompts: Sequence[Sequence[int]],
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
) -> Iterator[tuple[int, Completion]]:
    """Decodes prompts and yields each with its number, as soon as it is finished.

    Args:
      params: the model.
      prompts: token ids of every prompt.
      rows: prompts that are decoded at a time; under a mesh a multiple of its data axis.
      max_new_tokens: most tokens to generate per prompt.
      drafter: how tokens are proposed; default QSpec().
      sampling: how tokens are drawn; None: greedily.
      key: a random key, from which prompt i gets fold_in(key, i), or one per prompt.
      stop_tokens: tokens that end a prompt's output; None: the model's own; () for none.
      cache_capacity: KV slots per row; None: as many as the longest prompt needs. A prompt that
        needs more is reported in its `error`, and the others go on.
      cache_bits: bits per cache entry: 16, 8 or 4.
      activation: activation precision of the model itself, prompts included. "a8" and "a4" are for
        comparison: their output is what QSpec would draft if nobody verified it.
      stop_when: called after every round with the number of a prompt and its output so far, token
        ids; True ends the output with the first token for which it is true. Once true, it must
        stay true. `specjax.generation.text.StopStrings` makes one of texts.
      progress: called after every few rounds.

    Yields:
      The number of a prompt and its `Completion`.

    Raises:
      ValueError: there are no prompts, or an argument is out of its range.
    """
    drafter = QSpec() if drafter is None else drafter
    check_types(params, drafter, sampling)
    if check_integer("rows", rows) < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    check_rows(params.mesh, rows)
    if len(prompts) == 0:
        raise ValueError("prompts must hold at least one prompt, got none")
    check_cache_bits(cache_bits)
    check_activation(activation)
    jobs, refused = _check_prompts(params, prompts, drafter, max_new_tokens, cache_capacity)
    keys = row_keys(sampling, key, len(prompts))
    stops = check_stop_tokens(stop_tokens, params.config)
    yield from refused.items()
    if jobs:
        width = max(len(tokens) for tokens in jobs.values())
        drafter.validate(params, width + max_new_tokens)
        capacity = check_limits(
            params.config, width, max_new_tokens, drafter.draft_length, cache_capacity
        )
        run = Run(
            params, drafter, sampling, max_new_tokens, stops, capacity, cache_bits, activation,
            -(-width // CHUNK) * CHUNK,
        )  # fmt: skip
        rows = min(rows, whole_rows(params.mesh, len(jobs)))
        yield from _serve(run, jobs, keys, rows, len(refused), stop_when, progress)


def _serve(
    run: Run,
    jobs: dict[int, np.ndarray],
    keys: jax.Array | None,
    rows: int,
    refused: int,
    stop_when: StopWhen | None,
    progress: Callable[[Progress], None] | None,
) -> Iterator[tuple[int, Completion]]:
    """The loop on the host: chunks of the next prompts, rounds of the batch, what has finished."""
    queue = deque(jobs)
    state = empty_rows(run, rows, keys)
    running: dict[int, int] = {}  # row -> its prompt's number
    totals = Progress(refused, len(jobs) + refused, 0, 0, 0, 0, 0)
    coming: Prefill | None = None
    while queue or coming or running:
        for _ in range(_CHUNKS * (rows - len(running))):
            if coming is None:
                if not queue or len(running) == rows:
                    break
                number = queue.popleft()
                cache = one_row(run.params, run.capacity, run.cache_bits)
                coming = Prefill(number, jobs[number], cache, 0)
            coming = read_chunk(run, coming)
            if coming.done == len(coming.tokens) - 1:
                row = next(row for row in range(rows) if row not in running)
                state = admit(run, state, coming, row, keys)
                running[row], coming = coming.number, None
        if running:
            waiting = coming is not None or (queue and len(running) < rows)
            limit = 1 if waiting or stop_when is not None else _ROUNDS
            state, totals = _run_rounds(run, state, totals, limit)
            finished = np.asarray(readable(state.finished, run.params.mesh))
            ends = _ends(run, state, jobs, running, stop_when)
            for row in [row for row in running if finished[row] or row in ends]:
                completion = _completion(run, state, row, ends.get(row))
                if not finished[row]:
                    state = end_row(state, row, run.params.mesh)
                totals = _add(totals, completion)
                yield running.pop(row), completion
            if progress is not None:
                progress(totals)


def _run_rounds(
    run: Run, state: DecodeState, totals: Progress, limit: int
) -> tuple[DecodeState, Progress]:
    before = int(jnp.sum(state.stats.rounds))
    state, rounds = run_rounds(run.params, state, run.drafter, limit, run.activation)
    totals = dataclasses.replace(
        totals,
        useful_rounds=totals.useful_rounds + int(jnp.sum(state.stats.rounds)) - before,
        row_rounds=totals.row_rounds + int(rounds) * state.finished.shape[0],
    )
    return state, totals


def _ends(
    run: Run,
    state: DecodeState,
    jobs: dict[int, np.ndarray],
    running: dict[int, int],
    stop_when: StopWhen | None,
) -> dict[int, int]:
    """The rows that `stop_when` ends, and how many tokens each then has, the prompt included."""
    if stop_when is None:
        return {}
    tokens, lengths = map(np.asarray, readable((state.tokens, state.lengths), run.params.mesh))
    ends = {}
    for row, number in running.items():
        begin = len(jobs[number])
        output = tokens[row, begin : lengths[row]].tolist()
        if stop_when(number, output):
            counts = range(1, len(output))
            ends[row] = begin + 1 + bisect.bisect_left(
                counts, True, key=lambda count: stop_when(number, output[:count])
            )  # fmt: skip
    return ends


def _completion(run: Run, state: DecodeState, row: int, end: int | None) -> Completion:
    """What a row holds, or its first `end` tokens."""
    levels = run.drafter.levels(state.draft)
    tokens, length, stats, levels = jax.tree.map(
        lambda leaf: np.asarray(leaf[row]),
        readable((state.tokens, state.lengths, state.stats, levels), run.params.mesh),
    )
    if end is not None:
        stats = dataclasses.replace(stats, generated=stats.generated - (length - end))
        length = end
    return Completion(tokens[:length], stats, levels)


def _add(totals: Progress, completion: Completion) -> Progress:
    stats = completion.stats
    return dataclasses.replace(
        totals,
        done=totals.done + 1,
        generated=totals.generated + int(stats.generated),
        accepted=totals.accepted + int(stats.accepted),
        drafted=totals.drafted + int(stats.drafted),
    )


def _check_prompts(
    params: Params,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    max_new_tokens: int,
    capacity: int | None,
) -> tuple[dict[int, np.ndarray], dict[int, Completion]]:
    """The prompts that can be decoded, and what is wrong with the others, by their numbers."""
    jobs, refused = {}, {}
    max_new_tokens = check_integer("max_new_tokens", max_new_tokens)
    check_limits(params.config, 1, max_new_tokens, drafter.draft_length, capacity)
    for index, prompt in enumerate(prompts):
        try:
            tokens, _ = normalize_prompt(list(prompt), None, params.config)
            check_limits(
                params.config, tokens.shape[1], max_new_tokens, drafter.draft_length, capacity
            )
            jobs[index] = np.asarray(tokens[0])
        except ValueError as error:
            none = jax.tree.map(lambda counts: np.asarray(counts[0]), Stats.zeros(1))
            refused[index] = Completion(np.asarray(prompt), none, error=str(error))
    return jobs, refused
