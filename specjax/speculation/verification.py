"""Verification: one precise pass scores a whole proposal, and the acceptance rule judges it.

Drafts that were chosen without chance are compared with the target's own tokens, which are drawn on
the way (`specjax.speculation.walk`). Drafts that were drawn go through the rejection rule
(`specjax.speculation.acceptance`), which keeps the target's distribution.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pallas_kernels.activations import Activation
from pallas_kernels.row_sums import row_max
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.model.transformer import forward
from specjax.speculation import trees
from specjax.speculation.acceptance import (
    counted,
    matching_chain,
    matching_path,
    rejection_sample,
    sample_path,
)
from specjax.speculation.logprobs import score_emitted
from specjax.speculation.sampling import greedy, probabilities
from specjax.speculation.state import DecodeState, Proposal, Verified
from specjax.speculation.walk import walk


def verify(
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    activation: Activation = "a16",
    layers: tuple[int, ...] | None = None,
) -> tuple[Verified, KVCache]:
    """Scores a proposal in one pass, which overwrites the draft's cache entries, and judges it.

    The pass is no wider than its longest row needs: 0, 1, 3, 7, … drafts, or all.

    Returns the verdict, whose `count` the caller sets, and the cache with this pass's entries for
    every token up to the last draft.
    """
    n, counts = proposal.tokens.shape[1], proposal.counts
    widths = _widths(n, n if counts is None else proposal.least)
    if counts is None:
        counts = jnp.full_like(state.lengths, n)
        proposal = dataclasses.replace(proposal, counts=counts)

    def at(width: int, carry: _Turn) -> _Turn:
        narrow = proposal.first(width)
        before = _late(state, carry)
        logits, cache = score(params, before, narrow.tokens, activation, layers, narrow.parents)
        verified = _judge(before, narrow, logits)
        if proposal.parents is not None and narrow.parents is None:
            verified = dataclasses.replace(verified, nodes=narrow.tokens)  # a tree of no nodes
        return _Turn(jnp.bool_(True), jax.tree.map(_widen, verified, carry.verified), cache)

    carry = _Turn(jnp.bool_(False), _nothing(state, proposal), state.cache)
    if len(widths) == 1:
        carry = at(n, carry)
        return carry.verified, carry.cache
    longest = jnp.max(jnp.where(state.finished, 0, counts))
    chosen = jnp.searchsorted(jnp.array(widths), longest, method="compare_all")
    # Loops of at most one turn: XLA updates a loop's caches in place but copies a conditional's.
    for index, width in enumerate(widths):
        carry = lax.while_loop(partial(_due, chosen == index), partial(at, width), carry)
    return carry.verified, carry.cache


class _Turn(NamedTuple):
    """The verdict and the cache; valid once `done`."""

    done: jax.Array
    verified: Verified
    cache: KVCache


def _late(state: DecodeState, turn: _Turn) -> DecodeState:
    """The state with the turn's cache, its lengths computed in the turn.

    XLA moves what does not change in a loop in front of it: here the angles, embeddings and random
    keys of every width, of which a round needs one. It does not know that `done` is False.
    """
    late = turn.done.astype(jnp.int32)
    cache = turn.cache.with_lengths(turn.cache.lengths + late)
    return dataclasses.replace(state, cache=cache, lengths=state.lengths + late)


def _due(chosen: jax.Array, turn: _Turn) -> jax.Array:
    return chosen & ~turn.done


def _widths(n: int, least: int) -> list[int]:
    """The widths of passes over up to n drafts, at least `least`."""
    widths = [2**i - 1 for i in range(n.bit_length()) if least <= 2**i - 1 < n]
    return [*widths, n]


def _nothing(state: DecodeState, proposal: Proposal) -> Verified:
    """A verdict of zeros in the shape of a whole proposal's."""
    rows, n = proposal.tokens.shape
    logits = jax.ShapeDtypeStruct((rows, n + 1, state.vocab_size), jnp.float32)
    shapes = jax.eval_shape(_judge, state, proposal, logits)
    zeros: Verified = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return zeros


def _widen(values: jax.Array, whole: jax.Array) -> jax.Array:
    """Pads a narrow verdict's values to the shape of a whole one's."""
    missing = (there - here for here, there in zip(values.shape, whole.shape, strict=True))
    return jnp.pad(values, [(0, each) for each in missing])


def _judge(state: DecodeState, proposal: Proposal, logits: jax.Array) -> Verified:
    """Judges a proposal by the target's logits, f32[B, N + 1, V]."""
    possible = logits
    if proposal.allowed is not None:
        possible = jnp.where(_unpack(proposal.allowed, state.vocab_size), logits, -jnp.inf)
    judged = _judge_chain if proposal.parents is None else _judge_tree
    verified = judged(state, proposal, logits, possible)
    if state.logprobs is not None:
        behind = logits if verified.nodes is None else _along(logits, verified.nodes)
        scored = score_emitted(behind, verified.emitted, state.logprobs.k)
        verified = dataclasses.replace(verified, logprobs=scored)
    return verified


def _judge_chain(
    state: DecodeState, proposal: Proposal, logits: jax.Array, possible: jax.Array
) -> Verified:
    tokens, counts = proposal.tokens, proposal.counts
    assert counts is not None
    choices, distributions = greedy(possible), None
    if state.sampling is None:
        emitted, accepted = choices, matching_chain(tokens, counts, choices)
    elif proposal.distributions is None:
        end = walk(state, proposal, counted(tokens, counts), possible)
        emitted, accepted, distributions = end.emitted, end.accepted, end.distributions
    else:
        distributions = probabilities(possible, state.sampling, state.earlier(tokens))
        accepted, emitted = rejection_sample(
            state.round_keys(purpose=1), tokens, counts, proposal.distributions, distributions
        )
    return Verified(
        begins=state.lengths, proposed=tokens, drafted=counts, accepted=accepted, nodes=None,
        tested=jnp.minimum(accepted + 1, counts), emitted=emitted, count=accepted,
        logits=logits, choices=choices, finite=_finite(logits), distributions=distributions,
    )  # fmt: skip


def _judge_tree(
    state: DecodeState, proposal: Proposal, logits: jax.Array, possible: jax.Array
) -> Verified:
    tokens, counts, parents = proposal.tokens, proposal.counts, proposal.parents
    assert counts is not None and parents is not None
    meant = counted(tokens, counts)
    if proposal.verifiable is not None:
        meant &= proposal.verifiable
    choices, distributions = greedy(possible), None
    if state.sampling is None:
        accepted, nodes = matching_path(tokens, parents, meant, choices)
        emitted = _along(choices, nodes)
    elif proposal.distributions is None:
        end = walk(state, proposal, meant, possible)
        emitted, nodes, distributions = end.emitted, end.nodes[:, :-1], end.distributions
        accepted = end.accepted
    else:
        earlier = state.earlier(tokens, trees.ancestors(parents))
        everywhere = probabilities(possible, state.sampling, earlier)
        accepted, nodes, emitted = sample_path(
            state.round_keys(purpose=1), tokens, parents, meant, proposal.distributions, everywhere
        )
        distributions = _along(everywhere, nodes)
    last = jnp.max(nodes, axis=1, keepdims=True, initial=-1)
    return Verified(
        begins=state.lengths, proposed=tokens, drafted=jnp.sum(meant, axis=1, dtype=jnp.int32),
        accepted=accepted, nodes=nodes,
        tested=accepted + jnp.any(meant & (parents == last), axis=1), emitted=emitted,
        count=accepted, logits=logits, choices=choices,
        finite=_along(_finite(logits), nodes), distributions=distributions,
    )  # fmt: skip


def _unpack(bits: UInt32[Array, "B N words"], size: int) -> Bool[Array, "B N {size}"]:
    """Returns the first `size` bits, each word's lowest first. uint32[B, N, W] -> bool[B, N, V]."""
    each = (bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return each.reshape(*bits.shape[:-1], -1)[..., :size] > 0


def _finite(logits: jax.Array) -> jax.Array:
    """Tells where a token can be chosen. f32[B, N + 1, V] -> bool[B, N + 1].

    NaN outlasts `row_max`, but not every library's maximum.
    """
    return jnp.isfinite(row_max(logits)[..., 0])


def _along(values: jax.Array, nodes: jax.Array) -> jax.Array:
    """Selects the entries along a path. values: [B, N + 1, …], of the last token and every node."""
    places = jnp.pad(nodes + 1, ((0, 0), (1, 0)))
    return jnp.take_along_axis(values, places.reshape(*places.shape, *[1] * (values.ndim - 2)), 1)


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
