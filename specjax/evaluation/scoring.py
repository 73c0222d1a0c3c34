"""The probability of every next token of a given text, in one pass."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from pallas_kernels.activations import Activation
from pallas_kernels.row_tiles import map_row_tiles
from pallas_kernels.settings import own_settings
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import check_rows, on_mesh
from specjax.model.params import Params
from specjax.model.room import check_scoring
from specjax.model.transformer import forward
from specjax.speculation.sampling import greedy


def score_tokens(
    params: Params,
    tokens: Int32[Array | np.ndarray, "B T"],
    *,
    activation: Activation = "a16",
    cache_bits: int = 16,
) -> tuple[Float32[Array, "B T-1"], Int32[Array, "B T-1"]]:
    """Scores every token but the first, given those before it.

    Args:
      params: the model.
      tokens: int32[B, T], T at least 2; rows may be padded on the right. Under a mesh B is one, or
        a multiple of its data axis.
      activation: activation precision, "a16", "a8" or "a4".
      cache_bits: bits per KV cache entry: 16, 8 or 4.

    Returns:
      Natural log-probabilities of tokens[:, 1:], f32[B, T - 1], and the most probable token at each
      of these places, int32[B, T - 1].

    Raises:
      ValueError: a mesh does not divide the rows, or memory cannot hold so many.
    """
    rows, width = tokens.shape
    if rows > 1:
        check_rows(params.mesh, rows)
    check_scoring(params.config, rows, width, cache_bits, params.mesh)
    scored: tuple[jax.Array, jax.Array] = _score(params, tokens, activation, cache_bits)
    return scored


@partial(jax.jit, static_argnames=("activation", "cache_bits"))
@own_settings()
def _score(
    params: Params, tokens: jax.Array, activation: Activation, cache_bits: int
) -> tuple[jax.Array, jax.Array]:
    def read(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, width = tokens.shape
        cache = KVCache.create(params.config, rows, width, cache_bits, params.num_kv_heads)
        positions = jnp.broadcast_to(jnp.arange(width - 1), (rows, width - 1))
        logits, _ = forward(params, tokens[:, :-1], positions, cache, activation=activation)
        return score_logits(logits, tokens[:, 1:])

    return on_mesh(read, params.mesh, (params,), (tokens,))


def score_logits(
    logits: Float32[Array, "B T V"], tokens: Int32[Array, "B T"]
) -> tuple[Float32[Array, "B T"], Int32[Array, "B T"]]:
    """Scores the tokens that follow.

    Args:
      logits: f32[B, T, V].
      tokens: int32[B, T], the token that follows each place.

    Returns:
      The tokens' natural log-probabilities, f32[B, T], and the most probable tokens, int32[B, T].
      Neither depends on the other rows: all sums run over tiles of one shape (`map_row_tiles`).
    """
    given = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    totals = map_row_tiles(
        lambda tile: jax.nn.logsumexp(tile, axis=-1), logits.reshape(-1, logits.shape[-1])
    )
    return given - totals.reshape(given.shape), greedy(logits)
