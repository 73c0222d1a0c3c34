"""Verification: one precise pass scores a whole proposal, and the acceptance rule judges it.

Greedy drafts are compared with the target's own choices. Sampled drafts go through the rejection
rule (`specjax.speculation.acceptance`), which keeps the target's distribution.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.activations import Activation
from pallas_kernels.row_sums import row_max
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.model.transformer import forward
from specjax.speculation import trees
from specjax.speculation.acceptance import greedy_match, greedy_path, rejection_sample, sample_path
from specjax.speculation.logprobs import score_emitted
from specjax.speculation.sampling import greedy, probabilities, seen_tokens
from specjax.speculation.state import DecodeState, Proposal, Verified


def verify(
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    activation: Activation = "a16",
    layers: tuple[int, ...] | None = None,
) -> tuple[Verified, KVCache]:
    """Scores a proposal in one pass, which overwrites the draft's cache entries.

    Returns the verdict, whose `count` the caller sets, and the cache with this pass's entries for
    every token up to the last draft.
    """
    logits, cache = _score_proposal(params, state, proposal, activation, layers)
    counts = proposal.counts
    if counts is None:
        counts = jnp.full_like(state.lengths, proposal.tokens.shape[1])
    if proposal.parents is None:
        verified = _judge_chain(state, proposal, counts, logits)
    else:
        verified = _judge_tree(state, proposal, proposal.parents, counts, logits)
    if state.logprobs is not None:
        behind = logits if verified.nodes is None else _along(logits, verified.nodes)
        scored = score_emitted(behind, verified.emitted, state.logprobs.k)
        verified = dataclasses.replace(verified, logprobs=scored)
    return verified, cache


def _judge_chain(
    state: DecodeState, proposal: Proposal, counts: jax.Array, logits: jax.Array
) -> Verified:
    tokens, choices = proposal.tokens, greedy(logits)
    distributions = _distributions(state, proposal, logits)
    if distributions is None:
        accepted, emitted = greedy_match(tokens, counts, choices), choices
    else:
        accepted, emitted = rejection_sample(
            state.round_keys(purpose=1), tokens, counts, proposal.distributions, distributions
        )
    return Verified(
        proposed=tokens, drafted=counts, accepted=accepted, nodes=None,
        tested=jnp.minimum(accepted + 1, counts), emitted=emitted, count=accepted,
        logits=logits, choices=choices, finite=_finite(logits), distributions=distributions,
    )  # fmt: skip


def _judge_tree(
    state: DecodeState,
    proposal: Proposal,
    parents: jax.Array,
    counts: jax.Array,
    logits: jax.Array,
) -> Verified:
    tokens, choices = proposal.tokens, greedy(logits)
    distributions = _distributions(state, proposal, logits)
    meant = jnp.arange(tokens.shape[1]) < counts[:, None]
    if proposal.verifiable is not None:
        meant &= proposal.verifiable
    if distributions is None:
        accepted, nodes = greedy_path(tokens, parents, meant, choices)
        emitted = _along(choices, nodes)
    else:
        accepted, nodes, emitted = sample_path(
            state.round_keys(purpose=1), tokens, parents, meant,
            proposal.distributions, distributions,
        )  # fmt: skip
        distributions = _along(distributions, nodes)
    last = jnp.max(nodes, axis=1, keepdims=True, initial=-1)
    return Verified(
        proposed=tokens, drafted=jnp.sum(meant, axis=1, dtype=jnp.int32), accepted=accepted,
        nodes=nodes, tested=accepted + jnp.any(meant & (parents == last), axis=1),
        emitted=emitted, count=accepted, logits=logits, choices=choices,
        finite=_along(_finite(logits), nodes), distributions=distributions,
    )  # fmt: skip


def _finite(logits: jax.Array) -> jax.Array:
    """Tells where a token can be chosen. f32[B, N + 1, V] -> bool[B, N + 1].

    NaN outlasts `row_max`, but not every library's maximum.
    """
    return jnp.isfinite(row_max(logits)[..., 0])


def _distributions(state: DecodeState, proposal: Proposal, logits: jax.Array) -> jax.Array | None:
    """Returns the target's distribution at every place, f32[B, N + 1, V], or None when greedy."""
    if state.sampling is None:
        return None
    seen = None
    if state.sampling.repetition_penalty is not None:
        paths = None if proposal.parents is None else trees.ancestors(proposal.parents)
        seen = seen_tokens(state.tokens, state.lengths, proposal.tokens, state.vocab_size, paths)
    return probabilities(logits, state.sampling, seen)


def _along(values: jax.Array, nodes: jax.Array) -> jax.Array:
    """Selects the entries along a path. values: [B, N + 1, …], of the last token and every node."""
    places = jnp.pad(nodes + 1, ((0, 0), (1, 0)))
    return jnp.take_along_axis(values, places.reshape(*places.shape, *[1] * (values.ndim - 2)), 1)


def _score_proposal(
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    activation: Activation,
    layers: tuple[int, ...] | None,
) -> tuple[jax.Array, KVCache]:
    """Scores a proposal no wider than its longest row needs: 1, 3, 7, … drafts, or all."""
    tokens, counts, parents = proposal.tokens, proposal.counts, proposal.parents
    n = tokens.shape[1]
    if counts is None or n < 2:
        return score(params, state, tokens, activation, layers, parents)
    widths = [2**i - 1 for i in range(1, n.bit_length() + 1) if 2**i - 1 < n] + [n]

    longest = jnp.max(jnp.where(state.finished, 0, counts))
    chosen = jnp.searchsorted(jnp.array(widths), longest)

    def at(width: int, carry: _Scored) -> _Scored:
        narrow = dataclasses.replace(state, cache=carry.cache)
        first = None if parents is None else parents[:, :width]
        logits, cache = score(params, narrow, tokens[:, :width], activation, layers, first)
        return _Scored(jnp.bool_(True), carry.logits.at[:, : width + 1].set(logits), cache)

    # Loops of at most one turn: XLA updates a loop's caches in place but copies a conditional's.
    logits = jnp.zeros((tokens.shape[0], n + 1, state.vocab_size))
    carry = _Scored(jnp.bool_(False), logits, state.cache)
    for index, width in enumerate(widths):
        carry = lax.while_loop(partial(_due, chosen == index), partial(at, width), carry)
    return carry.logits, carry.cache


class _Scored(NamedTuple):
    """Logits and cache of a proposal; valid once `done`."""

    done: jax.Array
    logits: jax.Array
    cache: KVCache


def _due(chosen: jax.Array, carry: _Scored) -> jax.Array:
    return chosen & ~carry.done


def score(
    params: Params,
    state: DecodeState,
    following: Int32[Array, "B N"],
    activation: Activation,
    layers: tuple[int, ...] | None,
    parents: Int32[Array, "B N"] | None = None,
) -> tuple[Float32[Array, "B N+1 V"], KVCache]:
    """Scores the last token and each of `following` in one pass.

    The pass begins at the first token that the cache lacks. following: int32[B, N], a chain or,
    with parents: int32[B, N], a tree. The entry of token i goes to slot state.lengths + i.

    Returns the logits after each, f32[B, N + 1, V], and the cache with the pass's entries and
    unchanged `lengths`.
    """
    n = following.shape[1]
    cached = state.cache.lengths[:, None]
    positions = cached + jnp.arange(state.lag + 1 + n)
    places = jnp.minimum(positions, state.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(state.tokens, places, axis=1)
    if n:
        index = positions - state.lengths[:, None]
        drafted = jnp.take_along_axis(following, jnp.clip(index, 0, n - 1), axis=1)
        tokens = jnp.where(index < 0, tokens, drafted)
    paths = None
    if parents is not None:
        known = state.lengths[:, None] - cached
        paths = trees.ancestors(_parents_in_pass(parents, known, state.lag))
        positions = cached + trees.depths(paths)
    logits, cache = forward(params, tokens, positions, state.cache, paths, activation, layers)
    if state.lag:
        last = state.lengths[:, None] - 1 - cached
        logits = jnp.take_along_axis(logits, (last + jnp.arange(n + 1))[..., None], axis=1)
    return fit_vocabulary(logits, state.vocab_size), cache


def _parents_in_pass(parents: jax.Array, known: jax.Array, lag: int) -> jax.Array:
    """Numbers a tree's parents among the tokens of a pass that begins with `known` other tokens.

    known: int32[B, 1]. int32[B, N] -> int32[B, lag + 1 + N]; places past the tree repeat its last
    node.
    """
    n = parents.shape[1]
    place = jnp.arange(lag + 1 + n)
    node = jnp.clip(place - known, 0, n - 1)
    return jnp.where(place < known, place - 1, known + jnp.take_along_axis(parents, node, axis=1))


def fit_vocabulary(logits: Float32[Array, "*B _"], size: int) -> Float32[Array, "*B {size}"]:
    """Cuts or pads logits to the target's vocabulary, for a draft model that pads it differently.

    f32[..., V'] -> f32[..., size]; tokens that the model lacks get -inf.
    """
    own = logits.shape[-1]
    if own >= size:
        return logits[..., :size]
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, size - own)]
    return jnp.pad(logits, pad, constant_values=-jnp.inf)
