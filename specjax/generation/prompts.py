"""Checks prompts and limits at the door of decoding, and brings prompts into one form.

Under jit values are unknown; only shapes and dtypes are checked there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Integer

from specjax.checks import check_integer, shown
from specjax.model.config import ModelConfig

_TEXTS = str | bytes | bytearray | memoryview  # sequences of integers, but not token ids
Prompt = Integer[Array | np.ndarray, "*rows T"] | Sequence[int] | Sequence[Sequence[int]]
Lengths = Integer[Array | np.ndarray, " B"] | Sequence[int]


def normalize_prompt(
    prompt: Prompt,
    prompt_lengths: Lengths | None,
    config: ModelConfig,
) -> tuple[Int32[Array, "B T"], Int32[Array, " B"]]:
    """Converts a prompt of any accepted form to tokens int32[B, T] and lengths int32[B].

    Raises ValueError on an empty prompt, on tokens that are not integers or are outside the
    vocabulary, and on lengths that do not fit.
    """
    tokens: jax.Array | np.ndarray
    counts: Any = prompt_lengths
    if isinstance(prompt, jax.Array | np.ndarray):
        tokens = prompt
    else:
        if counts is not None:
            raise ValueError("prompt_lengths goes with an array; a list of prompts has its own")
        tokens, counts = _pad(prompt, config.pad_id)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"prompt must hold integers (token ids), got dtype {tokens.dtype.name}")
    if tokens.ndim == 1:
        tokens = tokens[None]
    if tokens.ndim != 2:
        raise ValueError(f"prompt must have shape [T] or [B, T], got {tokens.shape}")
    rows, width = tokens.shape
    if rows == 0 or width == 0:
        raise ValueError(f"prompt is empty (shape {tokens.shape}); it needs at least one token")
    try:
        lengths = jnp.asarray(np.full(rows, width, np.int32) if counts is None else counts)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"prompt_lengths must hold one integer per prompt, got {counts!r}"
        ) from None
    _check_lengths(lengths, rows, width)
    _check_tokens(tokens, lengths, config.vocab_size)
    if isinstance(tokens, jax.Array):
        return tokens.astype(jnp.int32), lengths.astype(jnp.int32)
    # JAX would compile a conversion for every shape.
    return jax.device_put(tokens.astype(np.int32)), lengths.astype(jnp.int32)


def check_ids(ids: Any, name: str = "prompt") -> list[int]:
    """Returns token ids as a list. Raises ValueError unless there are some, all integers."""
    if not isinstance(ids, Sequence | np.ndarray | jax.Array) or isinstance(ids, _TEXTS):
        raise ValueError(f"{name} must be a list of token ids, got {shown(ids)}")
    if isinstance(ids, np.ndarray | jax.Array) and ids.ndim != 1:
        raise ValueError(f"{name} must be a list of token ids, got an array of {ids.ndim} axes")
    if len(ids) == 0:
        raise ValueError(f"{name} is empty; it needs at least one token")
    if any(isinstance(token, jax.core.Tracer) for token in ids):
        raise ValueError(
            f"{name} must be part of an array int32[B, T] inside jax.jit, beside prompt_lengths; "
            "got a list of traced numbers"
        )
    return [check_integer(f"a token of {name}", token) for token in ids]


def check_limits(
    config: ModelConfig, width: int, max_new_tokens: int, reach: int, capacity: int | None
) -> int:
    """Returns the KV slots per row that a decode needs, and checks that they are allowed.

    A round writes the last token and all drafts before it knows how many are kept. The last round
    starts at width + max_new_tokens - 1 tokens at most and writes `reach` slots further.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    total = width + max_new_tokens
    if total > config.max_position_embeddings:
        raise ValueError(
            f"prompt of {width} tokens and max_new_tokens={max_new_tokens} make {total}; "
            f"the model has {config.max_position_embeddings} positions"
        )
    if reach > config.max_position_embeddings:
        positions = config.max_position_embeddings
        raise ValueError(f"drafts of {reach} tokens exceed the {positions} positions of the model")
    needed = total + reach - 1
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"cache_capacity={capacity} is too small: a prompt of {width} tokens, "
            f"max_new_tokens={max_new_tokens} and drafts of {reach} tokens need {needed} slots"
        )
    return needed if capacity is None else capacity


def check_stop_tokens(stop_tokens: Sequence[int] | None, config: ModelConfig) -> tuple[int, ...]:
    """Returns the tokens that end a row: the model's own unless given. Raises ValueError if
    unknown."""
    if stop_tokens is None:
        return config.stop_tokens
    if not isinstance(stop_tokens, Iterable):
        raise ValueError(f"stop_tokens must be a sequence of token ids, got {stop_tokens!r}")
    chosen = tuple(check_integer("a stop token", token) for token in stop_tokens)
    for token in chosen:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"stop token {token} is outside the vocabulary of {config.vocab_size} entries"
            )
    return chosen


def check_logprobs(logprobs: int | None, config: ModelConfig) -> int | None:
    """Returns the number of most probable tokens to record, or None. Raises ValueError where it is
    out of its range."""
    if logprobs is None:
        return None
    k = check_integer("logprobs", logprobs)
    if not 0 <= k <= config.vocab_size:
        raise ValueError(f"logprobs must be in 0 … {config.vocab_size} or None, got {k}")
    return k


def _pad(
    prompt: Sequence[int] | Sequence[Sequence[int]], pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Converts lists of tokens to a right-padded array and lengths."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, _TEXTS):
        raise ValueError(f"prompt must be token ids (an array or lists), got {shown(prompt)}")
    if len(prompt) == 0:
        raise ValueError("prompt is empty; it needs at least one token")
    rows: Any = prompt if isinstance(prompt[0], Sequence | np.ndarray) else [prompt]
    arrays = [np.array(check_ids(row, f"prompt row {index}")) for index, row in enumerate(rows)]
    lengths = np.array([row.size for row in arrays], np.int32)
    padded = np.full((len(arrays), int(np.max(lengths))), pad_id, np.int64)
    for index, row in enumerate(arrays):
        padded[index, : row.size] = row
    return padded, lengths


def _check_lengths(lengths: jax.Array, rows: int, width: int) -> None:
    if lengths.shape != (rows,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"prompt_lengths must hold one integer per prompt, shape ({rows},), "
            f"got {lengths.dtype.name}{list(lengths.shape)}"
        )
    if isinstance(lengths, jax.core.Tracer):
        return
    values = np.asarray(lengths)
    if values.min() < 1 or values.max() > width:
        bad = int(np.argmax((values < 1) | (values > width)))
        raise ValueError(f"prompt_lengths must be in 1 … {width}, got {values[bad]} in row {bad}")


def _check_tokens(tokens: jax.Array | np.ndarray, lengths: jax.Array, vocab_size: int) -> None:
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    values = np.asarray(tokens)
    valid = np.arange(values.shape[1]) < np.asarray(lengths)[:, None]
    wrong = valid & ((values < 0) | (values >= vocab_size))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"prompt holds token {values[row, column]} (row {row}, position {column}), outside the "
            f"vocabulary of {vocab_size} entries"
        )
