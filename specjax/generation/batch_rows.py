"""The rows of a continuous batch, on the device.

Prompts are read in chunks, put into rows, and decoded by rounds of all rows. Each function is
compiled once per run.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.activations import Activation
from pallas_kernels.cache_entries import Entries
from pallas_kernels.settings import own_settings
from specjax.generation.constraints import Guide
from specjax.generation.decoding import begin, empty_cache
from specjax.generation.kinds import Kind
from specjax.generation.request import Request
from specjax.generation.rows import Rows
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import (
    ROWS,
    blank_rows,
    bound,
    everywhere,
    on_mesh,
    own_row,
    row_specs,
)
from specjax.model.params import Params
from specjax.model.transformer import CHUNK, forward
from specjax.speculation.drafter import Drafter
from specjax.speculation.first_rows import first_rows, of_rows, put_first_rows
from specjax.speculation.logprobs import Logprobs, score_emitted
from specjax.speculation.rounds import step
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState, Verified

Block = tuple[Entries, Entries]  # keys and values of CHUNK slots of one row, in every layer


class Job(NamedTuple):
    """The values that all prompts of a run share. width: tokens that prompts are padded to."""

    params: Params
    request: Request
    width: int


class Waiting(NamedTuple):
    """A prompt that waits for a row.

    number: what its results are told apart by.
    tokens: int32[T].
    limit: the length at which it ends.
    key: [1], or None where all prompts are decoded greedily.
    sampling: in arrays [1], or None where all are decoded greedily.
    guide: holds its output to a grammar; None: the output is free.
    kind: the least kind of rounds that gives it what it asks for.
    echoes: whether the log-probabilities of its own tokens are asked for as well.
    """

    number: int
    tokens: np.ndarray
    limit: int
    key: jax.Array | None
    sampling: Sampling | None
    guide: Guide | None = None
    kind: Kind = Kind.PENALIZED
    echoes: bool = False

    def rows(self, width: int) -> Rows:
        """The prompt as a batch of one, its tokens padded to `width`."""
        tokens = _int32(np.zeros((1, width)))
        tokens[0, : len(self.tokens)] = self.tokens
        length, limit = _int32([len(self.tokens)]), _int32([self.limit])
        return Rows(tokens, length, limit, self.key, self.sampling)


def _int32(numbers: Any) -> Any:
    """An array of the host for a program. To make one on the device is a program of its own."""
    return np.array(numbers, np.int32)


class Gained(NamedTuple):
    """The gains of a round, for the host: fields of `Verified`; `counts` is its `count`.

    source: int32[B], which part of the drafter proposed; None: it has one, or a grammar did.
    """

    proposed: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    emitted: jax.Array
    counts: jax.Array
    nodes: jax.Array | None
    logprobs: Logprobs | None
    source: jax.Array | None = None

    @classmethod
    def of(cls, verified: Verified, source: jax.Array | None = None) -> Gained:
        return cls(
            verified.proposed, verified.drafted, verified.accepted, verified.emitted,
            verified.count, verified.nodes, verified.logprobs, source,
        )  # fmt: skip


class PromptReading(NamedTuple):
    """A prompt that is being read: the cache of one row, with `done` tokens in it.

    scores: log-probabilities of tokens 1 … done, a chunk each, where they are asked for.
    """

    prompt: Waiting
    cache: KVCache
    done: int
    scores: tuple[Logprobs, ...] = ()

    @property
    def unread(self) -> int:
        """Tokens to read yet; the first round reads the last one of a prompt."""
        return len(self.prompt.tokens) - 1 - self.done


def open_prompt(job: Job, prompt: Waiting, cache: KVCache | None = None) -> PromptReading:
    """Returns a prompt of which nothing is read yet.

    cache: a cache of one row, which is overwritten; None: a new one is made.
    """
    return PromptReading(prompt, _one_row(job.params, job.request) if cache is None else cache, 0)


def read_chunk(job: Job, reading: PromptReading) -> PromptReading:
    """Reads the next tokens of a prompt, all but the last one."""
    if not reading.unread:
        return reading
    done, end = reading.done, reading.done + min(CHUNK, reading.unread)
    chunk = np.zeros((1, CHUNK), np.int32)
    chunk[0, : end - done] = reading.prompt.tokens[done:end]
    cache = reading.cache.with_lengths(_int32([done]))
    if not reading.prompt.echoes:
        cache = _chunk(job.params, chunk, cache, job.request.activation)
        return reading._replace(cache=cache, done=end)
    following = np.zeros((1, CHUNK), np.int32)
    following[0, : end - done] = reading.prompt.tokens[done + 1 : end + 1]
    k = job.request.logprobs or 0
    scores, cache = _scored_chunk(job.params, chunk, following, cache, job.request.activation, k)
    own = jax.tree.map(lambda leaf: np.asarray(leaf)[0, : end - done], scores)
    return reading._replace(cache=cache, done=end, scores=(*reading.scores, own))


@jax.jit
def cut_block(cache: KVCache, row: jax.Array, start: jax.Array) -> Block:
    """Copies the entries of a row's slots start … start + CHUNK - 1."""

    def cut(part: jax.Array) -> jax.Array:
        one = lax.dynamic_slice_in_dim(part, row, 1)
        return lax.dynamic_slice_in_dim(one, start, CHUNK, axis=2)

    block: Block = jax.tree.map(cut, (cache.keys, cache.values))
    return block


@partial(jax.jit, donate_argnames="cache")
def put_block(cache: KVCache, block: Block, start: jax.Array) -> KVCache:
    """Writes a block's entries to one row's slots start … start + CHUNK - 1."""
    keys, values = jax.tree.map(
        lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, axis=2),
        (cache.keys, cache.values),
        block,
    )
    return dataclasses.replace(cache, keys=keys, values=values)


@partial(jax.jit, donate_argnames="cache", static_argnames="activation")
@own_settings()
def _chunk(params: Params, tokens: jax.Array, cache: KVCache, activation: Activation) -> KVCache:
    def read(params: Params, tokens: jax.Array, cache: KVCache) -> KVCache:
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        return forward(params, tokens, positions, cache, activation=activation)[1]

    return on_mesh(read, params.mesh, (params,), (tokens, cache), out=row_specs(cache))


@partial(jax.jit, donate_argnames="cache", static_argnames=("activation", "k"))
@own_settings()
def _scored_chunk(
    params: Params,
    tokens: jax.Array,
    following: jax.Array,
    cache: KVCache,
    activation: Activation,
    k: int,
) -> tuple[Logprobs, KVCache]:
    """`_chunk`, and the log-probabilities of the tokens that follow each place."""

    def read(
        params: Params, tokens: jax.Array, following: jax.Array, cache: KVCache
    ) -> tuple[Logprobs, KVCache]:
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        logits, cache = forward(params, tokens, positions, cache, activation=activation)
        return score_emitted(logits, following, k), cache

    return on_mesh(
        read, params.mesh, (params,), (tokens, following, cache), out=(P(), row_specs(cache))
    )


def admit(
    job: Job, state: DecodeState, reading: PromptReading, row: int
) -> tuple[DecodeState, KVCache]:
    """Returns the batch's state with a prompt that has been read in one of its rows, and the cache
    of one row into which the next prompt may be read."""
    one = _begin(job.params, job.request, reading.cache, reading.prompt.rows(job.width))
    after: DecodeState = _insert(job.request.drafter, state, one, np.int32(row), job.params.mesh)
    return after, one.cache


@partial(jax.jit, donate_argnames="cache")
@own_settings()
def _begin(params: Params, request: Request, cache: KVCache, rows: Rows) -> DecodeState:
    return on_mesh(begin, params.mesh, (params, request), (cache, rows))


@partial(jax.jit, donate_argnames="state", static_argnames="mesh")
@own_settings()
def _insert(
    drafter: Drafter, state: DecodeState, one: DecodeState, row: jax.Array, mesh: Mesh | None
) -> DecodeState:
    """Puts one row's state into the batch's: rows are the first axis of every leaf but those that
    the rows share, which get its prompt. Of its caches, only what holds tokens is copied."""

    def put(drafter: Drafter, row: jax.Array, state: DecodeState, one: DecodeState) -> DecodeState:
        own = own_row(row, state.finished.shape[0], mesh)
        none = jnp.zeros_like(one.lengths)
        shared = drafter.learn(state.shared, one.tokens, none, one.lengths)

        def insert(whole: Any, part: Any) -> Any:
            if isinstance(whole, KVCache):
                return whole.put_row(own, part)
            return whole.at[own].set(part[0])

        return dataclasses.replace(of_rows(insert, state, one), shared=shared)

    return on_mesh(put, mesh, (drafter, row), (state, one), out=row_specs(state))


@partial(jax.jit, donate_argnames="state", static_argnames="mesh")
@own_settings()
def end_row(state: DecodeState, row: jax.Array, mesh: Mesh | None) -> DecodeState:
    """Returns the batch's state with one of its rows finished."""

    def end(row: jax.Array, state: DecodeState) -> DecodeState:
        own = own_row(row, state.finished.shape[0], mesh)
        return dataclasses.replace(state, finished=state.finished.at[own].set(True))

    return on_mesh(end, mesh, (row,), (state,), out=row_specs(state))


@partial(jax.jit, static_argnames=("activation", "matched"), donate_argnames="state")
@own_settings()
def run_round(
    params: Params,
    state: DecodeState,
    drafter: Drafter,
    activation: Activation,
    matched: bool = False,
) -> tuple[DecodeState, Gained]:
    """Runs one round, and returns what it gained without the logits: they are large."""
    state, verified = step(params, state, drafter, activation, matched=matched)
    return state, Gained.of(verified, drafter.source(state.draft))


@partial(jax.jit, donate_argnames="state", static_argnames=("told", "rows"))
@own_settings()
def run_rounds(
    params: Params,
    request: Request,
    state: DecodeState,
    limit: jax.Array,
    told: int = 0,
    rows: int | None = None,
) -> tuple[DecodeState, jax.Array, Gained]:
    """Runs rounds until a running row finishes, at most `limit`.

    rows: how many rows run, the first ones; None: all. The others must be finished.

    Returns the number of rounds as well, and the gains of the first `told` of them, in arrays
    [rows, told, …].
    """
    mesh = params.mesh
    part = first_rows(state, rows)

    def rounds(
        params: Params, request: Request, limit: jax.Array, state: DecodeState
    ) -> tuple[DecodeState, jax.Array, Gained]:
        before = state.finished

        def one(state: DecodeState) -> tuple[DecodeState, Gained]:
            after: tuple[DecodeState, Gained] = run_round(
                params, state, request.drafter, request.activation, request.constrained
            )
            return after

        def more(carry: tuple[DecodeState, jax.Array, Gained]) -> jax.Array:
            # A row that waits for a prompt waits for all devices, so they stop together.
            same = everywhere(jnp.all(carry[0].finished == before), mesh)
            return (carry[1] < limit) & same

        def another(
            carry: tuple[DecodeState, jax.Array, Gained],
        ) -> tuple[DecodeState, jax.Array, Gained]:
            state, done, gains = carry
            state, gained = one(state)
            if told:
                gains = jax.tree.map(lambda all_, own: all_.at[:, done].set(own), gains, gained)
            return state, done + 1, gains

        def blank(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((leaf.shape[0], told, *leaf.shape[1:]), leaf.dtype)

        none: Gained = jax.tree.map(blank, jax.eval_shape(one, state)[1])
        return lax.while_loop(more, another, (state, jnp.int32(0), none))

    part, done, gains = on_mesh(
        rounds, mesh, (params, request, limit), (part,), out=(row_specs(part), P(), ROWS)
    )
    return put_first_rows(state, part), done, gains


@jax.jit
@own_settings()
def _one_row(params: Params, request: Request) -> KVCache:
    return on_mesh(partial(empty_cache, rows=1), params.mesh, (params, request), ())


def _spread(one: jax.Array, rows: int) -> jax.Array:
    """Repeats a prompt's array for all rows. A copy, because rounds donate the state."""
    return jnp.copy(jnp.broadcast_to(one, (rows, *one.shape[1:])))


def empty_rows(job: Job, rows: int, prompt: Waiting) -> DecodeState:
    """Returns a state of finished rows, each as if it had a prompt of one token; the given prompt
    lends its key and its sampling."""
    cache = jax.eval_shape(_one_row, job.params, job.request)
    one = jax.eval_shape(_begin, job.params, job.request, cache, prompt.rows(job.width))

    def blank(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert prompt.key is not None
            return _spread(prompt.key, rows)
        return jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)

    def state() -> DecodeState:
        ones = jnp.ones(rows, jnp.int32)
        blanks = jax.tree.map(blank, one)
        sampling = jax.tree.map(partial(_spread, rows=rows), prompt.sampling)
        shared = jax.tree.map(jnp.copy, job.request.drafter.shared())  # rounds donate the state
        finished: DecodeState = dataclasses.replace(
            blanks, lengths=ones, finished=ones > 0, sampling=sampling, shared=shared
        )
        return finished

    return bound(blank_rows(state, job.params.mesh), (job.params, job.request))
