"""One round for every row: draft, verify, accept, commit.

`decode` repeats it, and so does every level of `MultiLevel` with the model below as its drafter.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activations import Activation
from pallas_kernels.row_sums import row_max, row_sum
from pallas_kernels.settings import own_settings
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import ROWS, on_mesh, row_specs
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.first_rows import first_rows, put_first_rows
from specjax.speculation.state import DecodeState, Proposal, Stats, Verified
from specjax.speculation.verification import verify


@partial(jax.jit, static_argnames=("activation", "layers", "matched"), donate_argnames="state")
@own_settings()
def step(
    params: Params,
    state: DecodeState,
    drafter: Drafter,
    activation: Activation = "a16",
    layers: tuple[int, ...] | None = None,
    matched: bool = False,
) -> tuple[DecodeState, Verified]:
    """Runs one round. The given state is donated: do not use it afterwards.

    activation, layers: how the verifying pass computes. A level that only drafts for another level
        may be less precise than the target.
    matched: keep a draft where it is the token that plain decoding draws, however it was chosen.
    """
    return on_mesh(
        partial(_step, activation=activation, layers=layers, matched=matched),
        params.mesh, (params, drafter), (state,), out=(row_specs(state), ROWS),
    )  # fmt: skip


@partial(jax.jit, static_argnames="rows", donate_argnames="state")
@own_settings()
def propose(
    params: Params, state: DecodeState, drafter: Drafter, rows: int | None = None
) -> tuple[Proposal, DecodeState]:
    """The first half of a round whose drafts the host reads before `conclude` verifies them.

    Drafts are matched. The given state is donated.

    rows: how many rows run, the first ones; None: all. The others must be finished.
    """
    part = first_rows(state, rows)
    proposal, part = on_mesh(
        partial(_propose, matched=True),
        params.mesh, (params, drafter), (part,), out=(ROWS, row_specs(part)),
    )  # fmt: skip
    return proposal, put_first_rows(state, part)


@partial(jax.jit, static_argnames=("activation", "observed", "rows"), donate_argnames="state")
@own_settings()
def conclude(
    params: Params,
    state: DecodeState,
    drafter: Drafter,
    proposal: Proposal,
    activation: Activation = "a16",
    observed: bool = True,
    rows: int | None = None,
) -> tuple[DecodeState, Verified]:
    """The second half of a round. The given state is donated.

    observed: whether the drafter made the proposal, and learns from the verdict.
    rows: as in `propose`.

    Returns the state, and the verdict without logits and distributions, which only drafters read.
    """

    def conclusion(
        params: Params, drafter: Drafter, state: DecodeState, proposal: Proposal
    ) -> tuple[DecodeState, Verified]:
        after = _conclude(params, drafter, state, proposal, activation, None, observed)
        none = after[1].logits[..., :0]
        return after[0], dataclasses.replace(after[1], logits=none, distributions=None)

    part = first_rows(state, rows)
    part, verified = on_mesh(
        conclusion, params.mesh, (params, drafter), (part, proposal), out=(row_specs(part), ROWS)
    )
    return put_first_rows(state, part), verified


def _step(
    params: Params,
    drafter: Drafter,
    state: DecodeState,
    activation: Activation,
    layers: tuple[int, ...] | None,
    matched: bool,
) -> tuple[DecodeState, Verified]:
    """Runs `step` on the rows of one device."""
    proposal, state = _propose(params, drafter, state, matched)
    return _conclude(params, drafter, state, proposal, activation, layers)


def _propose(
    params: Params, drafter: Drafter, state: DecodeState, matched: bool
) -> tuple[Proposal, DecodeState]:
    """Drafts, on the rows of one device."""
    proposal, state = drafter.propose(params, state)
    return dataclasses.replace(proposal, distributions=None) if matched else proposal, state


def _conclude(
    params: Params,
    drafter: Drafter,
    state: DecodeState,
    proposal: Proposal,
    activation: Activation,
    layers: tuple[int, ...] | None,
    observed: bool = True,
) -> tuple[DecodeState, Verified]:
    """Verifies, accepts and commits, on the rows of one device."""
    verified, cache = verify(params, state, proposal, activation, layers)
    count, stopped, failed = _count(state, verified)
    verified = dataclasses.replace(verified, count=count)
    lengths = state.lengths + count
    slots = state.lengths[:, None] + jnp.arange(verified.emitted.shape[1])
    slots = jnp.where(slots < lengths[:, None], slots, state.tokens.shape[1])  # drop the rest
    rows = jnp.arange(slots.shape[0])[:, None]
    logprobs = state.logprobs
    if logprobs is not None:
        assert verified.logprobs is not None
        logprobs = logprobs.put(slots - state.prompts[:, None], verified.logprobs)
    tokens = state.tokens.at[rows, slots].set(verified.emitted, mode="drop")
    state = dataclasses.replace(
        state,
        tokens=tokens,
        lengths=lengths,
        finished=state.finished | stopped | failed | (lengths >= state.limits),
        failed=state.failed | failed,
        cache=_line_up(cache, state, verified).with_lengths(lengths - 1),
        draft=drafter.observe(state.draft, verified) if observed else state.draft,
        stats=_count_round(state, verified),
        logprobs=logprobs,
        shared=drafter.learn(state.shared, tokens, state.lengths, lengths),
    )
    return state, verified


def _line_up(cache: KVCache, state: DecodeState, verified: Verified) -> KVCache:
    """Moves the accepted nodes' entries into consecutive slots; a chain's already are."""
    nodes = verified.nodes
    if nodes is None:
        return cache
    count = jnp.where(state.finished, 0, verified.accepted)

    def move(i: jax.Array, cache: KVCache) -> KVCache:
        needed = i < count
        source = jnp.where(needed, state.lengths + nodes[:, i], 0)
        target = jnp.where(needed, state.lengths + i, cache.capacity)
        return cache.move(source[:, None], target[:, None])

    # Node i of a path has number i or more, so no entry is overwritten before it is read.
    moved: KVCache = lax.fori_loop(0, jnp.max(count), move, cache)
    return moved


def _count(state: DecodeState, verified: Verified) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the tokens that each row gains, int32[B], whether the last of them ends the row,
    and whether the next would have come from NaN or infinite logits, bool[B] each.

    Such logits of a level that only drafts end nothing: the target judges the drafts.
    """
    index = jnp.arange(verified.emitted.shape[1])
    count = jnp.minimum(verified.accepted + 1, state.limits - state.lengths)
    stops = jnp.isin(verified.emitted, jnp.array(state.stop_tokens, jnp.int32))
    if state.confidence is not None:
        stops |= _probabilities(verified) < state.confidence
    stops &= index < count[:, None]
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, count)
    wrong = ~verified.finite & (index < count[:, None]) & (state.depth == 0)
    failed = jnp.any(wrong, axis=1)
    count = jnp.where(failed, jnp.argmax(wrong, axis=1), count)
    running = ~state.finished
    return jnp.where(running, count, 0), stopped & ~failed & running, failed & running


def _probabilities(verified: Verified) -> jax.Array:
    """The probability of every emitted token, f32[B, N + 1]; those past the count mean nothing."""
    if verified.distributions is not None:
        index = verified.emitted[..., None]
        return jnp.take_along_axis(verified.distributions, index, axis=2)[..., 0]
    logits = verified.logits
    if verified.nodes is not None:  # those after the last token, and after the nodes of the path
        path = jnp.pad(verified.nodes + 1, ((0, 0), (1, 0)))
        logits = jnp.take_along_axis(logits, path[..., None], axis=1)
    return 1 / row_sum(jnp.exp(logits - row_max(logits)))[..., 0]


def _count_round(state: DecodeState, verified: Verified) -> Stats:
    """Returns the counts after a round. Finished rows do not count."""
    running = (~state.finished).astype(jnp.int32)
    stats = state.stats
    return Stats(
        rounds=stats.rounds + running,
        drafted=stats.drafted + running * verified.drafted,
        tested=stats.tested + running * verified.tested,
        accepted=stats.accepted + running * verified.accepted,
        generated=stats.generated + verified.count,
    )
