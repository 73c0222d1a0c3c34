"""What a model says of given text, in one pass: the probability of every next token."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from specjax.kv_cache import KVCache
from specjax.params import Params
from specjax.sampling import greedy
from specjax.transformer import forward


@partial(jax.jit, static_argnames=("activation", "cache_bits"))
def score(
    params: Params, tokens: jax.Array, *, activation: str = "a16", cache_bits: int = 16
) -> tuple[jax.Array, jax.Array]:
    """Scores every token but the first, given those before it.

    Args:
      params: the model.
      tokens: int32[B, T], T at least 2; rows may be padded on the right.
      activation: activation precision, "a16", "a8" or "a4".
      cache_bits: bits per KV cache entry: 16, 8 or 4.

    Returns:
      Natural log-probabilities of tokens[:, 1:], f32[B, T - 1], and the most probable token at each
      of these places, int32[B, T - 1].
    """
    rows, width = tokens.shape
    cache = KVCache.create(params.config, rows, width, cache_bits)
    positions = jnp.broadcast_to(jnp.arange(width - 1), (rows, width - 1))
    logits, _ = forward(params, tokens[:, :-1], positions, cache, activation=activation)
    given = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    log_probs = given - jax.nn.logsumexp(logits, axis=-1)
    return log_probs, greedy(logits)
