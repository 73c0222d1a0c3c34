"""The loop: draft, verify, accept, commit.

`decode` compiles it once, as a `lax.while_loop` over a batch whose rows advance at different
speeds. `start` and `rounds.step` are the same loop taken apart, for streaming and for tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.settings import own_settings
from specjax.files.kept_programs import kept
from specjax.generation.prompts import Lengths, Prompt
from specjax.generation.request import Options, Request
from specjax.generation.rows import Rows, bucketed, fitted, prompt_rows
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import ROWS, bound, on_mesh, readable
from specjax.model.params import Params
from specjax.model.transformer import prefill
from specjax.speculation.drafter import Drafter
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.rounds import conclude, step
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState, Proposal, Stats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """The result of `decode`.

    tokens: int32[B, T + max_new_tokens], the prompt included, padded with config.pad_id.
    lengths: int32[B], valid tokens per row, the prompt included.
    stats: counts per row.
    failed: bool[B], rows that ended early because the model's next logits were NaN or infinite, as
        damaged or too large weights make them.
    levels: counts of the levels that drafted, the one below the target first; see `MultiLevel`.
    logprobs: log-probabilities of the new tokens; None: not asked for.
    """

    tokens: jax.Array
    lengths: jax.Array
    stats: Stats
    failed: jax.Array
    levels: tuple[Stats, ...] = ()
    logprobs: Logprobs | None = None


def failure(generated: int) -> str:
    """Says why a row of that many new tokens failed."""
    return (
        f"the model gave NaN or infinite logits after {generated} new tokens: "
        "its weights or scales are damaged or too large"
    )


def decode(
    params: Params,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    prompt_lengths: Lengths | None = None,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_capacity: int | None = None,
    cache_bits: int = 16,
    logprobs: int | None = None,
) -> DecodeResult:
    """Generates text speculatively; the output is that of plain decoding with 16-bit activations.

    Greedy output is bit-identical to `Autoregressive()`'s on CPU. Sampled output has the same
    distribution. A pure function: it composes with jit (max_new_tokens, stop_tokens,
    cache_capacity, cache_bits and logprobs static) and vmap over keys. For many samples of one
    prompt a batch of rows with one key each is faster.

    Args:
      params: the model.
      prompt: int32[B, T], right-padded, with `prompt_lengths`; int32[T], a batch of one; or,
        outside jit, a list of token ids or a list of such lists.
      max_new_tokens: the most tokens to generate per row, at least 1.
      prompt_lengths: int32[B], tokens per prompt; None: all T.
      drafter: proposes tokens; default Auto().
      sampling: draws tokens, each field one number or one per row; None: the greedy choice.
      key: a random key, or one per row ([B]); goes with `sampling`.
      stop_tokens: tokens that end a row (kept in the output); None: the model's own; () for none.
      cache_capacity: KV slots per row; None: as many as needed.
      cache_bits: bits per cache entry: 16 (the model's own dtype), 8 or 4 (one scale and zero per
        token and head). Draft and verification read the same entries, so the output stays exact.
      logprobs: k: return the log-probability of every new token, and the k most probable tokens at
        each place with theirs, k in 0 … vocab_size; None: return none. They are those of the
        model's own distribution, before `sampling`; see `Logprobs`.

    Returns:
      A `DecodeResult`.

    Raises:
      ValueError: an argument is out of its range; the message says which and what is accepted.
    """
    request = Request.make(
        params, max_new_tokens=max_new_tokens, drafter=drafter, sampling=sampling,
        stop_tokens=stop_tokens, cache_capacity=cache_capacity, cache_bits=cache_bits,
        logprobs=logprobs,
    )  # fmt: skip
    return decode_request(params, request, prompt, prompt_lengths, key)


def decode_request(
    params: Params,
    request: Request,
    prompt: Prompt,
    prompt_lengths: Lengths | None = None,
    key: jax.Array | None = None,
) -> DecodeResult:
    """`decode` with its options already made into a request."""
    rows = prompt_rows(params, request, prompt, prompt_lengths, key)
    args = (params, *bucketed(params, request, rows))
    result = kept(_decode, *args)(*args)
    return _cut(result, rows.tokens.shape[1], request.max_new_tokens)


def start(
    params: Params,
    prompt: Prompt,
    *,
    prompt_lengths: Lengths | None = None,
    key: jax.Array | None = None,
    **options: Unpack[Options],
) -> DecodeState:
    """Returns the state before the first round, the prompt in the cache. Arguments as in
    `decode`. Buffers are no larger than they must be."""
    request = Request.make(params, **options)
    rows = prompt_rows(params, request, prompt, prompt_lengths, key)
    after: DecodeState = _start(params, *fitted(params, request, rows))
    return after


def start_request(
    params: Params, request: Request, prompt: Prompt, key: jax.Array | None = None
) -> tuple[Drafter, DecodeState]:
    """`start` with its options already made into a request, and with buffers of a bucket.

    Returns the drafter as it decodes, which the rounds must be given, and the state.
    """
    wide, rows = bucketed(params, request, prompt_rows(params, request, prompt, None, key))
    state: DecodeState = kept(_start, params, wide, rows)(params, wide, rows)
    return wide.drafter, bound(state, (params, wide))


@jax.jit
@own_settings()
def _decode(params: Params, request: Request, rows: Rows) -> DecodeResult:
    """The whole loop in one program, so that the cache is never copied."""
    result = on_mesh(_decode_rows, params.mesh, (params, request), (rows,), out=ROWS)
    return readable(result, params.mesh)


@jax.jit
@own_settings()
def _start(params: Params, request: Request, rows: Rows) -> DecodeState:
    return on_mesh(_start_rows, params.mesh, (params, request), (rows,))


def _cut(result: DecodeResult, width: int, new: int) -> DecodeResult:
    """The result for prompts of `width` tokens and `new` new ones."""
    if result.tokens.shape[1] == width + new:
        return result
    return dataclasses.replace(
        result,
        tokens=_first(width + new, result.tokens),
        logprobs=jax.tree.map(partial(_first, new), result.logprobs),
    )


def _first(count: int, values: jax.Array) -> jax.Array:
    """The first places of every row. NumPy takes them: JAX would compile a program per count."""
    if isinstance(values, jax.core.Tracer):
        return values[:, :count]
    first: jax.Array = jax.device_put(np.asarray(values)[:, :count], values.sharding)
    return first


def _decode_rows(params: Params, request: Request, rows: Rows) -> DecodeResult:
    drafter = request.drafter

    def turn(state: DecodeState) -> DecodeState:
        return _rested(params, request, step(params, state, drafter, request.activation)[0])

    state = lax.while_loop(_running, turn, _start_rows(params, request, rows))
    return DecodeResult(
        state.tokens, state.lengths, state.stats, state.failed, drafter.levels(state.draft),
        state.logprobs,
    )  # fmt: skip


def _running(state: DecodeState) -> jax.Array:
    return ~jnp.all(state.finished)


def _rested(params: Params, request: Request, state: DecodeState) -> DecodeState:
    """The state after the rounds that the drafter lets pass."""
    drafter = request.drafter
    rounds, draft = drafter.rest(state.draft)
    if rounds is None:
        return state
    nothing = Proposal(jnp.zeros((len(state.lengths), 0), jnp.int32))

    def turn(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        left, state = carry
        after = conclude(params, state, drafter, nothing, request.activation, observed=False)
        return left - 1, after[0]

    carry = rounds, dataclasses.replace(state, draft=draft)
    return lax.while_loop(lambda carry: (carry[0] > 0) & _running(carry[1]), turn, carry)[1]


def _start_rows(params: Params, request: Request, rows: Rows) -> DecodeState:
    """Fills the cache with every prompt token but the last, which the first round reads."""
    cache = empty_cache(params, request, rows.tokens.shape[0])
    cache = prefill(params, rows.tokens[:, :-1], cache, request.activation)
    state, drafter = begin(params, request, cache, rows), request.drafter
    none = jnp.zeros_like(state.lengths)
    shared = drafter.learn(drafter.shared(), state.tokens, none, state.lengths)
    return dataclasses.replace(state, shared=shared)


def empty_cache(params: Params, request: Request, rows: int) -> KVCache:
    """Returns an empty cache of a request whose capacity is known."""
    assert request.cache_capacity is not None
    return KVCache.create(
        params.config, rows, request.cache_capacity, request.cache_bits, params.num_kv_heads
    )


def begin(params: Params, request: Request, cache: KVCache, rows: Rows) -> DecodeState:
    """Returns the state before the first round. The cache holds every prompt token but the last.

    `shared` is not set yet. Raises ValueError where the drafter's own state lacks the axis of rows.
    """
    tokens, lengths, limits, keys, sampling = rows
    count, width = tokens.shape
    pad_id = params.config.pad_id
    logprobs = None
    if request.logprobs is not None:
        logprobs = Logprobs.zeros(count, request.max_new_tokens, request.logprobs)
    valid = jnp.arange(width) < lengths[:, None]
    state = DecodeState(
        tokens=jnp.pad(
            jnp.where(valid, tokens, pad_id),
            ((0, 0), (0, request.max_new_tokens)),
            constant_values=pad_id,
        ),
        prompts=jnp.copy(lengths),  # rounds donate the state
        lengths=lengths,
        limits=limits,
        finished=jnp.zeros(count, bool),
        failed=jnp.zeros(count, bool),
        cache=cache.with_lengths(lengths - 1),
        keys=keys,
        draft=None,
        stats=Stats.zeros(count),
        sampling=sampling,
        stop_tokens=request.stop_tokens,
        vocab_size=params.config.vocab_size,
        logprobs=logprobs,
    )
    draft = request.drafter.init(params, state, width)
    _check_draft(request.drafter, draft, count)
    return dataclasses.replace(state, draft=draft)


def _check_draft(drafter: Drafter, draft: Any, rows: int) -> None:
    """Raises ValueError unless every array of the drafter's own state has the rows first."""
    for leaf in jax.tree.leaves(draft, is_leaf=lambda node: isinstance(node, KVCache)):
        if not isinstance(leaf, KVCache) and jnp.shape(leaf)[:1] != (rows,):
            raise ValueError(
                f"init of a drafter must return arrays whose first axis is the {rows} rows of the "
                f"batch, and {type(drafter).__name__}'s returns one of shape {jnp.shape(leaf)}"
            )
