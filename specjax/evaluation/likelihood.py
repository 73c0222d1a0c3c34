"""The probability of a continuation after its context, and of a whole text.

Texts of different lengths share a batch, which is read in chunks of one fixed size. So few shapes
are compiled, and only the logits of one chunk exist at a time; a chunk of context alone computes
none. A text's likelihood does not depend on the other texts of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Activation, check_activation
from pallas_kernels.cache_entries import check_cache_bits
from pallas_kernels.settings import own_settings
from specjax.checks import check_integer
from specjax.evaluation.scoring import score_logits
from specjax.model.config import ModelConfig
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import blank_rows, check_rows, on_mesh, readable, whole_rows
from specjax.model.params import Params
from specjax.model.room import check_cache, check_scoring
from specjax.model.transformer import forward

Tokens = Sequence[int] | np.ndarray
_Scored = tuple[tuple[jax.Array, jax.Array] | None, KVCache]

_CHUNK = 64  # tokens per pass
_SHORTEST = 128  # slots of the smallest cache; the others have a power of two times as many


def log_likelihoods(
    params: Params,
    pairs: Sequence[tuple[Tokens, Tokens]],
    *,
    rows: int = 8,
    activation: Activation = "a16",
    cache_bits: int = 16,
    max_length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[float, bool]]:
    """Scores continuations after their contexts.

    Args:
      params: the model.
      pairs: token ids of every context and of its continuation, at least one each. Where both
        together are longer than the model can read, the context loses its first tokens.
      rows: pairs per pass; under a mesh a multiple of its data axis.
      activation: activation precision, "a16", "a8" or "a4".
      cache_bits: bits per KV cache entry: 16, 8 or 4.
      max_length: most tokens that the model reads of a pair (it reads all but the last one); None:
        its number of positions.
      progress: called with the pairs done and the pairs in all.

    Returns:
      For every pair the sum of the continuation's log-probabilities in nats, and whether each of
      its tokens was the most probable one.

    Raises:
      ValueError: a part of a pair is empty, holds a token outside the vocabulary, or is a
        continuation longer than `max_length`; or an argument is out of its range.
    """
    check_activation(activation)
    check_cache_bits(cache_bits)
    if check_integer("rows", rows) < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    check_rows(params.mesh, rows)
    longest = _check_max_length(max_length, params.config)
    items = [_item(index, *pair, longest, params.config) for index, pair in enumerate(pairs)]
    order = sorted(range(len(items)), key=lambda index: len(items[index].tokens))
    results: dict[int, tuple[float, bool]] = {}
    rows = min(rows, whole_rows(params.mesh, len(items)))
    for first in range(0, len(items), max(rows, 1)):
        chosen = order[first : first + rows]
        some = [items[index] for index in chosen]
        batch = _read_batch(params, some, rows, activation, cache_bits)
        results |= zip(chosen, batch, strict=True)
        if progress is not None:
            progress(len(results), len(items))
    return [results[index] for index in range(len(items))]


def rolling_log_likelihoods(
    params: Params,
    texts: Sequence[Tokens],
    *,
    prefix: int,
    rows: int = 8,
    activation: Activation = "a16",
    cache_bits: int = 16,
    max_length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Scores whole texts; every token is predicted once.

    A text is cut into windows of `max_length` predicted tokens. Before a window the model reads as
    many tokens as still fit: one, and more before the last window, which is shorter.

    Args:
      params: the model.
      texts: token ids of every text.
      prefix: the token that the first one of a text is predicted from.
      rows, activation, cache_bits, max_length: as for `log_likelihoods`.
      progress: called with the windows done and the windows in all.

    Returns:
      For every text the sum of its tokens' log-probabilities in nats; 0 for an empty one.

    Raises:
      ValueError: as `log_likelihoods` does.
    """
    longest = _check_max_length(max_length, params.config)
    pairs, owners = [], []
    for index, text in enumerate(texts):
        whole = np.array([prefix, *text])
        for start in range(1, len(whole), longest):
            pairs.append((whole[:start], whole[start : start + longest]))
            owners.append(index)
    scores = log_likelihoods(
        params, pairs, rows=rows, activation=activation, cache_bits=cache_bits, max_length=longest,
        progress=progress,
    )  # fmt: skip
    sums: list[list[float]] = [[] for _ in texts]
    for owner, (nats, _) in zip(owners, scores, strict=True):
        sums[owner].append(nats)
    return [math.fsum(each) for each in sums]


class _Item(NamedTuple):
    """A context with its continuation, cut to the length that the model can read.

    tokens: int32[n]; the last `scored` of them are the continuation.
    """

    tokens: np.ndarray
    scored: int


def _read_batch(
    params: Params, items: Sequence[_Item], rows: int, activation: Activation, cache_bits: int
) -> list[tuple[float, bool]]:
    """Reads at most `rows` items chunk by chunk, up to the end of the longest one."""
    lengths = np.array([len(item.tokens) for item in items])
    width = -(-(int(lengths.max()) - 1) // _CHUNK) * _CHUNK
    check_scoring(params.config, rows, _CHUNK, cache_bits, params.mesh)
    check_cache(params.config, rows, _capacity(width), cache_bits, params.mesh)
    tokens = np.zeros((rows, width + 1), np.int32)
    for row, item in enumerate(items):
        tokens[row, : lengths[row]] = item.tokens
    begins = lengths - [item.scored for item in items]
    log_probs = np.zeros((rows, width + 1), np.float32)
    best = np.zeros((rows, width + 1), np.int32)
    create = partial(KVCache.create, params.config, rows, _capacity(width), cache_bits)
    cache = blank_rows(create, params.mesh)
    for start in range(0, width, _CHUNK):
        end = start + _CHUNK
        wanted = bool(np.any((begins <= end) & (lengths > start + 1)))
        scores, cache = _read_chunk(params, tokens[:, start : end + 1], cache, activation, wanted)
        if scores is not None:
            scores = readable(scores, params.mesh)
            log_probs[:, start + 1 : end + 1], best[:, start + 1 : end + 1] = scores
    results = []
    for row, (begin, end) in enumerate(zip(begins, lengths, strict=True)):
        likely = bool((best[row, begin:end] == tokens[row, begin:end]).all())
        results.append((math.fsum(log_probs[row, begin:end].tolist()), likely))
    return results


@partial(jax.jit, static_argnames=("activation", "wanted"), donate_argnames="cache")
@own_settings()
def _read_chunk(
    params: Params, tokens: jax.Array, cache: KVCache, activation: Activation, wanted: bool
) -> _Scored:
    """Reads the next tokens of every row, int32[B, T + 1]: all but the last one.

    Returns the scores of tokens[:, 1:], f32[B, T] and int32[B, T] as `score_logits` gives them, if
    they are wanted; and the cache with tokens[:, :-1] in it.
    """

    def read(params: Params, tokens: jax.Array, cache: KVCache) -> _Scored:
        known = tokens[:, :-1]
        positions = cache.lengths[:, None] + jnp.arange(known.shape[1])
        logits, cache = forward(params, known, positions, cache, activation=activation)
        cache = cache.with_lengths(cache.lengths + known.shape[1])
        return score_logits(logits, tokens[:, 1:]) if wanted else None, cache

    return on_mesh(read, params.mesh, (params,), (tokens, cache))


def _capacity(width: int) -> int:
    """Cache slots for `width` tokens, from a short list: each is compiled anew."""
    return _SHORTEST << max(0, (width - 1).bit_length() - (_SHORTEST - 1).bit_length())


def _item(
    index: int,
    context: Tokens,
    continuation: Tokens,
    longest: int,
    config: ModelConfig,
) -> _Item:
    """One pair, checked and cut."""
    parts = {"context": np.asarray(context), "continuation": np.asarray(continuation)}
    for name, part in parts.items():
        if part.ndim != 1 or len(part) == 0 or not np.issubdtype(part.dtype, np.integer):
            raise ValueError(
                f"the {name} of pair {index} must be a list of at least one token id, got {part!r}"
            )
        if part.min() < 0 or part.max() >= config.vocab_size:
            raise ValueError(
                f"the {name} of pair {index} must hold tokens in 0 … {config.vocab_size - 1}, "
                f"got {part.min()} … {part.max()}"
            )
    if len(continuation) > longest:
        raise ValueError(
            f"the continuation of pair {index} has {len(continuation)} tokens, "
            f"and no more than {longest} can be read at once"
        )
    room = longest + 1 - len(continuation)  # the last token is predicted and not read
    tokens = np.concatenate((parts["context"][-room:], parts["continuation"]))
    return _Item(tokens.astype(np.int32), len(continuation))


def _check_max_length(max_length: int | None, config: ModelConfig) -> int:
    positions = config.max_position_embeddings
    if max_length is None:
        return positions
    if not 1 <= check_integer("max_length", max_length) <= positions:
        raise ValueError(
            f"max_length must be between 1 and the model's {positions} positions, got {max_length}"
        )
    return max_length
