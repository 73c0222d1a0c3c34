"""The loop: draft, verify, accept, commit.

`decode` compiles it once, as a `lax.while_loop` over a batch whose rows advance at different
speeds. `start` and `rounds.step` are the same loop taken apart, for streaming and for tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_entries import check_cache_bits
from specjax.checks import check_integer
from specjax.drafting import QSpec
from specjax.generation.prompts import Prompt, check_limits, check_stop_tokens, normalize_prompt
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import ROWS, check_drafter, check_rows, on_mesh, readable
from specjax.model.params import Params
from specjax.model.transformer import prefill
from specjax.speculation.drafter import Drafter
from specjax.speculation.rounds import step
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState, Stats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """What `decode` returns.

    tokens: int32[B, T + max_new_tokens], the prompt included, padded with config.pad_id.
    lengths: int32[B], valid tokens per row, the prompt included.
    stats: counts per row.
    levels: counts of the levels that drafted, the one below the target first; see `MultiLevel`.
    """

    tokens: jax.Array
    lengths: jax.Array
    stats: Stats
    levels: tuple[Stats, ...] = ()


def decode(
    params: Params,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    prompt_lengths: jax.Array | Sequence[int] | None = None,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_capacity: int | None = None,
    cache_bits: int = 16,
) -> DecodeResult:
    """Generates text speculatively; the output is that of plain decoding with 16-bit activations.

    Greedy output is bit-identical to `Autoregressive()`'s on CPU. Sampled output has the same
    distribution. A pure function: it composes with jit (max_new_tokens, stop_tokens, cache_capacity
    and cache_bits static) and vmap over keys; for many samples of one prompt a batch of rows with
    one key each is quicker.

    Args:
      params: the model.
      prompt: int32[B, T], right-padded, with `prompt_lengths`; int32[T], a batch of one; or,
        outside jit, a list of token ids or a list of such lists.
      max_new_tokens: most tokens to generate per row, at least 1.
      prompt_lengths: int32[B], tokens per prompt; None: all T.
      drafter: how tokens are proposed; default QSpec().
      sampling: how tokens are drawn; None: greedily.
      key: a random key, or one per row ([B]); goes with `sampling`.
      stop_tokens: tokens that end a row (kept in the output); None: the model's own; () for none.
      cache_capacity: KV slots per row; None: as many as needed.
      cache_bits: bits per cache entry: 16 (the model's own dtype), 8 or 4 (one scale and zero per
        token and head). Draft and verification read the same entries: output stays exact.

    Returns:
      A `DecodeResult`.

    Raises:
      ValueError: an argument is out of its range; the message says which and what is accepted.
    """
    arguments = _arguments(
        params, prompt, max_new_tokens=max_new_tokens, prompt_lengths=prompt_lengths,
        drafter=drafter, sampling=sampling, key=key, stop_tokens=stop_tokens,
        cache_capacity=cache_capacity, cache_bits=cache_bits,
    )  # fmt: skip
    return _decode(params, **arguments)


def start(
    params: Params,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    prompt_lengths: jax.Array | Sequence[int] | None = None,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_capacity: int | None = None,
    cache_bits: int = 16,
) -> DecodeState:
    """The state before the first round: arguments checked, prompt in the cache. See `decode`."""
    arguments = _arguments(
        params, prompt, max_new_tokens=max_new_tokens, prompt_lengths=prompt_lengths,
        drafter=drafter, sampling=sampling, key=key, stop_tokens=stop_tokens,
        cache_capacity=cache_capacity, cache_bits=cache_bits,
    )  # fmt: skip
    return _start(params, **arguments)


def _arguments(
    params: Params,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    prompt_lengths: jax.Array | Sequence[int] | None,
    drafter: Drafter | None,
    sampling: Sampling | None,
    key: jax.Array | None,
    stop_tokens: Sequence[int] | None,
    cache_capacity: int | None,
    cache_bits: int,
) -> dict[str, Any]:
    """Checks what the caller gave and brings it into the compiled functions' form."""
    drafter = QSpec() if drafter is None else drafter
    check_types(params, drafter, sampling)
    config = params.config
    max_new_tokens = check_integer("max_new_tokens", max_new_tokens)
    if cache_capacity is not None:
        cache_capacity = check_integer("cache_capacity", cache_capacity)
    cache_bits = check_integer("cache_bits", cache_bits)
    check_cache_bits(cache_bits)
    tokens, lengths = normalize_prompt(prompt, prompt_lengths, config)
    check_rows(params.mesh, tokens.shape[0])
    capacity = check_limits(
        config, tokens.shape[1], max_new_tokens, drafter.draft_length, cache_capacity
    )
    drafter.validate(params, tokens.shape[1] + max_new_tokens)
    return {
        "tokens": tokens,
        "lengths": lengths,
        "drafter": drafter,
        "keys": row_keys(sampling, key, tokens.shape[0]),
        "sampling": sampling,
        "max_new_tokens": max_new_tokens,
        "capacity": capacity,
        "cache_bits": cache_bits,
        "stop_tokens": check_stop_tokens(stop_tokens, config),
    }


def check_types(params: Any, drafter: Any, sampling: Any) -> None:
    """Raises ValueError where an argument is something else altogether."""
    if not isinstance(params, Params):
        raise ValueError(f"params must be what specjax.load returns, got {type(params).__name__}")
    if isinstance(drafter, type) or not isinstance(drafter, Drafter):
        raise ValueError(f"drafter must be a drafter such as specjax.QSpec(), got {drafter!r}")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a specjax.Sampling or None, got {sampling!r}")
    check_drafter(params, drafter)


_STATIC = ("max_new_tokens", "capacity", "cache_bits", "stop_tokens")


@partial(jax.jit, static_argnames=_STATIC)
def _decode(params: Params, **arguments: Any) -> DecodeResult:
    """The whole of it in one program, so that the cache is never copied."""
    return readable(_by_rows(_decode_rows, params, ROWS, **arguments), params.mesh)


@partial(jax.jit, static_argnames=_STATIC)
def _start(params: Params, **arguments: Any) -> DecodeState:
    return _by_rows(_start_rows, params, None, **arguments)


def _by_rows(
    function: Callable[..., Any],
    params: Params,
    out: Any,
    *,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    keys: jax.Array | None,
    sampling: Sampling | None,
    **sizes: Any,
) -> Any:
    """function on the rows of every device; `out` as for `on_mesh`."""
    return on_mesh(
        partial(function, **sizes),
        params.mesh, (params, drafter), (tokens, lengths, keys, sampling), out=out,
    )  # fmt: skip


def _decode_rows(params: Params, drafter: Drafter, *rows: Any, **sizes: Any) -> DecodeResult:
    state = lax.while_loop(
        lambda state: ~jnp.all(state.finished),
        lambda state: step(params, state, drafter)[0],
        _start_rows(params, drafter, *rows, **sizes),
    )
    return DecodeResult(state.tokens, state.lengths, state.stats, drafter.levels(state.draft))


def _start_rows(
    params: Params,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    keys: jax.Array | None,
    sampling: Sampling | None,
    *,
    max_new_tokens: int,
    capacity: int,
    cache_bits: int,
    stop_tokens: tuple[int, ...],
) -> DecodeState:
    """Precise cache entries of every prompt token but the last, which the first round reads."""
    rows = tokens.shape[0]
    cache = KVCache.create(params.config, rows, capacity, cache_bits, params.num_kv_heads)
    cache = prefill(params, tokens[:, :-1], cache)
    return begin(
        params, cache, tokens=tokens, lengths=lengths, drafter=drafter, keys=keys,
        sampling=sampling, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens,
    )  # fmt: skip


def begin(
    params: Params,
    cache: KVCache,
    *,
    tokens: jax.Array,
    lengths: jax.Array,
    drafter: Drafter,
    keys: jax.Array | None,
    sampling: Sampling | None,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
) -> DecodeState:
    """The state before the first round. cache: of every prompt token but the last.

    tokens: int32[B, T], right-padded; lengths: int32[B].
    """
    rows, width = tokens.shape
    valid = jnp.arange(width) < lengths[:, None]
    state = DecodeState(
        tokens=jnp.pad(
            jnp.where(valid, tokens, params.config.pad_id),
            ((0, 0), (0, max_new_tokens)),
            constant_values=params.config.pad_id,
        ),
        lengths=lengths,
        limits=lengths + max_new_tokens,
        finished=jnp.zeros(rows, bool),
        cache=cache.with_lengths(lengths - 1),
        keys=keys,
        draft=None,
        stats=Stats.zeros(rows),
        sampling=sampling,
        stop_tokens=stop_tokens,
        vocab_size=params.config.vocab_size,
    )
    return dataclasses.replace(state, draft=drafter.init(params, state, width))


def row_keys(sampling: Sampling | None, key: jax.Array | None, rows: int) -> jax.Array | None:
    """One key per row, or None for greedy decoding."""
    if sampling is None:
        if key is not None:
            raise ValueError("key goes with sampling: pass sampling=specjax.Sampling(...) as well")
        return None
    if key is None:
        raise ValueError("sampling needs key, for example key=jax.random.key(0)")
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key must be made by jax.random.key, got {key!r}")
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    if key.shape != (rows,):
        raise ValueError(f"key must be one key or one per row, shape ({rows},), got {key.shape}")
    return key
