"""The rows of a continuous batch, as the device sees them: prompts that are read in chunks, rows
that they are put into, rounds of all rows. Each function is compiled once per run.
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
from specjax.generation.decoding import begin
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import blank_rows, everywhere, on_mesh, own_row, row_specs
from specjax.model.params import Params
from specjax.model.transformer import forward
from specjax.speculation.drafter import Drafter
from specjax.speculation.rounds import step
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState

CHUNK = 64  # prompt tokens per pass


class Run(NamedTuple):
    """What all prompts of a run have in common. width: that prompts are padded to."""

    params: Params
    drafter: Drafter
    sampling: Sampling | None
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    capacity: int
    cache_bits: int
    activation: Activation
    width: int


class Prefill(NamedTuple):
    """A prompt that is being read: the cache of one row, with `done` tokens in it."""

    number: int
    tokens: np.ndarray
    cache: KVCache
    done: int


def read_chunk(run: Run, prompt: Prefill) -> Prefill:
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
def _chunk(params: Params, tokens: jax.Array, cache: KVCache, activation: Activation) -> KVCache:
    def read(params: Params, tokens: jax.Array, cache: KVCache) -> KVCache:
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        return forward(params, tokens, positions, cache, activation=activation)[1]

    return on_mesh(read, params.mesh, (params,), (tokens, cache), out=row_specs(cache))


def admit(
    run: Run, state: DecodeState, prompt: Prefill, row: int, keys: jax.Array | None
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


def _options(run: Run) -> dict[str, Any]:
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


@partial(jax.jit, donate_argnames="state", static_argnames="mesh")
def end_row(state: DecodeState, row: jax.Array, mesh: Mesh | None) -> DecodeState:
    """The batch's state without one of its rows."""

    def end(row: jax.Array, state: DecodeState) -> DecodeState:
        own = own_row(row, state.finished.shape[0], mesh)
        return dataclasses.replace(state, finished=state.finished.at[own].set(True))

    return on_mesh(end, mesh, (row,), (state,), out=row_specs(state))


@partial(jax.jit, donate_argnames="state", static_argnames="activation")
def run_rounds(
    params: Params, state: DecodeState, drafter: Drafter, limit: jax.Array, activation: Activation
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
def one_row(params: Params, capacity: int, cache_bits: int) -> KVCache:
    def create(params: Params) -> KVCache:
        return KVCache.create(params.config, 1, capacity, cache_bits, params.num_kv_heads)

    return on_mesh(create, params.mesh, (params,), ())


def empty_rows(run: Run, rows: int, keys: jax.Array | None) -> DecodeState:
    """A state of finished rows, each as if it had a prompt of one token."""
    one = jax.eval_shape(
        partial(_begin, **_options(run)), run.params,
        jax.eval_shape(one_row, run.params, capacity=run.capacity, cache_bits=run.cache_bits),
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
