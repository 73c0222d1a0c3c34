"""Continuous batching: many prompts through a fixed number of rows.

A row that finishes is given the next prompt at once, first come, first served (ORCA, Yu et al.
2022; QSpec's evaluation runs so). Rounds of the whole batch are compiled once; a prompt is read in
chunks of one fixed size, few between two rounds, so that running rows wait little. A row's output
depends neither on its neighbours nor on when it began: it is that of decoding the prompt alone.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.activations import check_activation
from pallas_kernels.cache_entries import check_cache_bits
from specjax.checks import check_integer
from specjax.decoding import begin, check_types, row_keys
from specjax.drafting import Drafter, QSpec
from specjax.kv_cache import KVCache
from specjax.parallel import (
    DATA,
    blank_rows,
    check_rows,
    everywhere,
    on_mesh,
    own_row,
    readable,
    row_specs,
)
from specjax.params import Params
from specjax.prompts import check_limits, check_stop_tokens, normalize_prompt
from specjax.rounds import step
from specjax.sampling import Sampling
from specjax.state import DecodeState, Stats
from specjax.transformer import forward

CHUNK = 64  # prompt tokens per pass
_CHUNKS = 4  # at most, for every row without a prompt, while the others wait for their next round
_ROUNDS = 64  # at most, before the host is told how far the rows are


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
    activation: str = "a16",
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
        run = _Run(
            params, drafter, sampling, max_new_tokens, stops, capacity, cache_bits, activation,
            -(-width // CHUNK) * CHUNK,
        )  # fmt: skip
        shards = 1 if params.mesh is None else params.mesh.shape[DATA]
        needed = -(-len(jobs) // shards) * shards
        yield from _serve(run, jobs, keys, min(rows, needed), len(refused), progress)


class _Run(NamedTuple):
    """What all prompts of a run have in common. width: that prompts are padded to."""

    params: Params
    drafter: Drafter
    sampling: Sampling | None
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    capacity: int
    cache_bits: int
    activation: str
    width: int


def _serve(
    run: _Run,
    jobs: dict[int, np.ndarray],
    keys: jax.Array | None,
    rows: int,
    refused: int,
    progress: Callable[[Progress], None] | None,
) -> Iterator[tuple[int, Completion]]:
    """The loop on the host: chunks of the next prompts, rounds of the batch, what has finished."""
    queue = deque(jobs)
    state = _empty(run, rows, keys)
    running: dict[int, int] = {}  # row -> its prompt's number
    totals = Progress(refused, len(jobs) + refused, 0, 0, 0, 0, 0)
    coming: _Prefill | None = None
    while queue or coming or running:
        for _ in range(_CHUNKS * (rows - len(running))):
            if coming is None:
                if not queue or len(running) == rows:
                    break
                number = queue.popleft()
                cache = _one_row(run.params, run.capacity, run.cache_bits)
                coming = _Prefill(number, jobs[number], cache, 0)
            coming = _read_chunk(run, coming)
            if coming.done == len(coming.tokens) - 1:
                row = next(row for row in range(rows) if row not in running)
                state = _admit(run, state, coming, row, keys)
                running[row], coming = coming.number, None
        if running:
            waiting = coming is not None or (queue and len(running) < rows)
            limit = 1 if waiting else _ROUNDS
            state, totals = _run_rounds(run, state, totals, limit)
            finished = np.asarray(readable(state.finished, run.params.mesh))
            for row in np.flatnonzero(finished).tolist():
                if row in running:
                    completion = _completion(run, state, row)
                    totals = _add(totals, completion)
                    yield running.pop(row), completion
            if progress is not None:
                progress(totals)


def _run_rounds(
    run: _Run, state: DecodeState, totals: Progress, limit: int
) -> tuple[DecodeState, Progress]:
    before = int(jnp.sum(state.stats.rounds))
    state, rounds = _rounds(run.params, state, run.drafter, limit, run.activation)
    totals = dataclasses.replace(
        totals,
        useful_rounds=totals.useful_rounds + int(jnp.sum(state.stats.rounds)) - before,
        row_rounds=totals.row_rounds + int(rounds) * state.finished.shape[0],
    )
    return state, totals


class _Prefill(NamedTuple):
    """A prompt that is being read: the cache of one row, with `done` tokens in it."""

    number: int
    tokens: np.ndarray
    cache: KVCache
    done: int


def _read_chunk(run: _Run, prompt: _Prefill) -> _Prefill:
    """Reads the next tokens of a prompt, all but the last one."""
    end = min(prompt.done + CHUNK, len(prompt.tokens) - 1)
    if end <= prompt.done:
        return prompt
    chunk = np.zeros((1, CHUNK), np.int32)
    chunk[0, : end - prompt.done] = prompt.tokens[prompt.done : end]
    cache = prompt.cache.with_lengths(jnp.array([prompt.done]))
    cache = _chunk(run.params, chunk, cache, run.activation)
    return prompt._replace(cache=cache, done=end)


@partial(jax.jit, donate_argnames="cache", static_argnames="activation")
def _chunk(params: Params, tokens: jax.Array, cache: KVCache, activation: str) -> KVCache:
    def read(params: Params, tokens: jax.Array, cache: KVCache) -> KVCache:
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        return forward(params, tokens, positions, cache, activation=activation)[1]

    return on_mesh(read, params.mesh, (params,), (tokens, cache), out=row_specs(cache))


def _admit(
    run: _Run, state: DecodeState, prompt: _Prefill, row: int, keys: jax.Array | None
) -> DecodeState:
    """The batch's state with a prompt in one of its rows."""
    tokens = np.zeros((1, run.width), np.int32)
    tokens[0, : len(prompt.tokens)] = prompt.tokens
    key = None if keys is None else keys[prompt.number][None]
    lengths = jnp.array([len(prompt.tokens)])
    one = _begin(
        run.params, prompt.cache, tokens=tokens, lengths=lengths, keys=key, **_options(run)
    )
    return _insert(state, one, row, run.params.mesh)


def _options(run: _Run) -> dict[str, Any]:
    return {
        "drafter": run.drafter, "sampling": run.sampling,
        "max_new_tokens": run.max_new_tokens, "stop_tokens": run.stop_tokens,
    }  # fmt: skip


@partial(jax.jit, static_argnames=("sampling", "max_new_tokens", "stop_tokens"))
def _begin(
    params: Params,
    cache: KVCache,
    *,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    keys: jax.Array | None,
    **options: Any,
) -> DecodeState:
    def begun(params, drafter, cache, tokens, lengths, keys):
        return begin(
            params, cache, tokens=tokens, lengths=lengths, drafter=drafter, keys=keys, **options
        )

    return on_mesh(begun, params.mesh, (params, drafter), (cache, tokens, lengths, keys))


@partial(jax.jit, donate_argnames="state", static_argnames="mesh")
def _insert(state: DecodeState, one: DecodeState, row: jax.Array, mesh: Mesh | None) -> DecodeState:
    """Every leaf of a state has the rows as its first axis."""

    def put(row: jax.Array, state: DecodeState, one: DecodeState) -> DecodeState:
        own = own_row(row, state.finished.shape[0], mesh)
        return jax.tree.map(lambda whole, part: whole.at[own].set(part[0]), state, one)

    return on_mesh(put, mesh, (row,), (state, one), out=row_specs(state))


@partial(jax.jit, donate_argnames="state", static_argnames="activation")
def _rounds(
    params: Params, state: DecodeState, drafter: Drafter, limit: jax.Array, activation: str
) -> tuple[DecodeState, jax.Array]:
    """Rounds until a running row finishes, at most `limit`; and how many there were."""
    mesh = params.mesh

    def rounds(
        params: Params, drafter: Drafter, limit: jax.Array, state: DecodeState
    ) -> tuple[DecodeState, jax.Array]:
        before = state.finished

        def more(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
            # A row that waits for a prompt waits for all devices, so they stop together.
            same = everywhere(jnp.all(carry[0].finished == before), mesh)
            return (carry[1] < limit) & same

        def one(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
            return step(params, carry[0], drafter, activation)[0], carry[1] + 1

        return lax.while_loop(more, one, (state, jnp.int32(0)))

    return on_mesh(rounds, mesh, (params, drafter, limit), (state,), out=(row_specs(state), P()))


@partial(jax.jit, static_argnames=("capacity", "cache_bits"))
def _one_row(params: Params, capacity: int, cache_bits: int) -> KVCache:
    def create(params: Params) -> KVCache:
        return KVCache.create(params.config, 1, capacity, cache_bits, params.num_kv_heads)

    return on_mesh(create, params.mesh, (params,), ())


def _empty(run: _Run, rows: int, keys: jax.Array | None) -> DecodeState:
    """A state of finished rows, each as if it had a prompt of one token."""
    one = jax.eval_shape(
        partial(_begin, **_options(run)), run.params,
        jax.eval_shape(_one_row, run.params, capacity=run.capacity, cache_bits=run.cache_bits),
        tokens=jax.ShapeDtypeStruct((1, run.width), jnp.int32),
        lengths=jax.ShapeDtypeStruct((1,), jnp.int32),
        keys=None if keys is None else jax.eval_shape(lambda: keys[:1]),
    )  # fmt: skip

    def blank(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert keys is not None
            return jnp.broadcast_to(keys[:1], (rows,))
        return jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)

    def state() -> DecodeState:
        ones = jnp.ones(rows, jnp.int32)
        blanks = jax.tree.map(blank, one)
        return dataclasses.replace(blanks, lengths=ones, finished=ones > 0)

    return blank_rows(state, run.params.mesh)


def _completion(run: _Run, state: DecodeState, row: int) -> Completion:
    levels = run.drafter.levels(state.draft)
    tokens, length, stats, levels = jax.tree.map(
        lambda leaf: np.asarray(leaf[row]),
        readable((state.tokens, state.lengths, state.stats, levels), run.params.mesh),
    )
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
