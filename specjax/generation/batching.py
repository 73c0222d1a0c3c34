"""Continuous batching: many prompts through a fixed number of rows.

A row that finishes gets the next prompt at once, first come, first served (ORCA, Yu et al. 2022;
QSpec's evaluation works this way). Rounds of the whole batch are compiled once. A prompt is read in
chunks of one fixed size, a few between two rounds, so that running rows wait little. A row's output
depends neither on its neighbours nor on when it began: it equals that of decoding the prompt alone.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Activation
from specjax.generation.batch import Batch, open_batch
from specjax.generation.completion import Completion
from specjax.generation.guided import Constraints
from specjax.generation.request import Options, Request
from specjax.model.parallel import readable
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.sampling import Sampling

_ROUNDS = 64  # at most, before the host is told how far the rows are

StopWhen = Callable[[int, list[int]], bool]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run of `decode_many` is.

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
    logprobs: int | None = None,
    constraint: Constraints = None,
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
      drafter: proposes tokens; default Auto(). All prompts share the memory of an Auto; one without
        gets an empty one.
      sampling: draws tokens, each field one number or one per prompt; None: the greedy choice.
      key: a random key, from which prompt i gets fold_in(key, i), or one per prompt.
      stop_tokens: tokens that end a prompt's output; None: the model's own; () for none.
      cache_capacity: KV slots per row; None: as many as the longest prompt needs.
      cache_bits: bits per cache entry: 16, 8 or 4.
      activation: activation precision of the model itself, prompts included. "a8" and "a4" are for
        comparison: their output is what QSpec would draft without verification.
      logprobs: k: return the log-probability of every new token, and the k most probable tokens at
        each place with theirs; None: return none. See `Logprobs`.
      constraint: a grammar that the outputs keep to, or one or None per prompt; None: they are
        free. See `Constraint`.
      stop_when: called after every round with the number of a prompt and its output so far, token
        ids. True ends the output with the first token for which it is true; once true, it must
        stay true. `specjax.generation.text.StopStrings` makes one from texts.
      progress: called with a `Progress` after every few rounds.

    Returns:
      One `Completion` per prompt.

    Raises:
      ValueError: there are no prompts, or an argument is out of its range.
    """
    finished = complete(
        params, prompts, rows=rows, max_new_tokens=max_new_tokens, drafter=drafter,
        sampling=sampling, key=key, stop_tokens=stop_tokens, cache_capacity=cache_capacity,
        cache_bits=cache_bits, activation=activation, logprobs=logprobs, constraint=constraint,
        stop_when=stop_when, progress=progress,
    )  # fmt: skip
    return [completion for _, completion in sorted(finished, key=itemgetter(0))]


def complete(
    params: Params,
    prompts: Iterable[Sequence[int]],
    *,
    rows: int = 8,
    key: jax.Array | None = None,
    constraint: Constraints = None,
    share: bool = True,
    stop_when: StopWhen | None = None,
    progress: Callable[[Progress], None] | None = None,
    **options: Unpack[Options],
) -> Iterator[tuple[int, Completion]]:
    """`decode_many` as an iterator: yields each prompt's number and `Completion` once it is
    finished.

    share: whether an Auto without a memory gets one for all prompts. The counts of a prompt's
        drafts then depend on the prompts before it; its output does not.
    """
    request = Request.make(params, **options, constrained=constraint is not None)
    yield from complete_request(
        params, request, prompts, rows=rows, key=key, constraint=constraint, share=share,
        stop_when=stop_when, progress=progress,
    )  # fmt: skip


def complete_request(
    params: Params,
    request: Request,
    prompts: Iterable[Sequence[int]],
    *,
    rows: int,
    key: jax.Array | None = None,
    constraint: Constraints = None,
    share: bool = True,
    stop_when: StopWhen | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[tuple[int, Completion]]:
    """`complete` with its options already made into a request."""
    batch, refused = open_batch(params, request, prompts, rows, key, constraint, share)
    yield from refused.items()
    if batch is not None:
        yield from _serve(batch, len(refused), stop_when, progress)


def _serve(
    batch: Batch,
    refused: int,
    stop_when: StopWhen | None,
    progress: Callable[[Progress], None] | None,
) -> Iterator[tuple[int, Completion]]:
    """Drives a batch to its end, and yields what has finished."""
    totals = Progress(refused, len(batch.waiting) + refused, 0, 0, 0, 0, 0)
    while batch.busy:
        batch.fill()
        if batch.running:
            limit = 1 if batch.wanting or stop_when is not None else _ROUNDS
            totals = _run(batch, totals, limit)
            ends = _ends(batch, stop_when)
            for row in sorted({*batch.finished(), *ends}):
                number = batch.running[row].number
                completion = batch.take(row, ends.get(row))
                totals = _add(totals, completion)
                yield number, completion
            if progress is not None:
                progress(totals)


def _run(batch: Batch, totals: Progress, limit: int) -> Progress:
    before = int(jnp.sum(batch.state.stats.rounds))
    rounds = batch.run(limit)
    return dataclasses.replace(
        totals,
        useful_rounds=totals.useful_rounds + int(jnp.sum(batch.state.stats.rounds)) - before,
        row_rounds=totals.row_rounds + rounds * batch.state.finished.shape[0],
    )


def _ends(batch: Batch, stop_when: StopWhen | None) -> dict[int, int]:
    """Returns the rows that `stop_when` ends, with their lengths in tokens, the prompt included."""
    if stop_when is None:
        return {}
    state, mesh = batch.state, batch.job.params.mesh
    tokens, lengths = map(np.asarray, readable((state.tokens, state.lengths), mesh))
    ends = {}
    for row, prompt in batch.running.items():
        number, begin = prompt.number, len(prompt.tokens)
        output = tokens[row, begin : lengths[row]].tolist()
        if output and stop_when(number, output):
            counts = range(1, len(output))
            ends[row] = begin + 1 + bisect.bisect_left(
                counts, True, key=lambda count: stop_when(number, output[:count])
            )  # fmt: skip
    return ends


def _add(totals: Progress, completion: Completion) -> Progress:
    stats = completion.stats
    return dataclasses.replace(
        totals,
        done=totals.done + 1,
        generated=totals.generated + int(stats.generated),
        accepted=totals.accepted + int(stats.accepted),
        drafted=totals.drafted + int(stats.drafted),
    )
