"""Perplexity of a text, in windows that slide over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pallas_kernels.activations import Activation, check_activation
from pallas_kernels.cache_entries import check_cache_bits
from specjax.evaluation.scoring import score_tokens
from specjax.model.parallel import whole_rows
from specjax.model.params import Params, check_is_params


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text under a model.

    nats: mean negative log-likelihood per token, in nats.
    tokens: the number of tokens that were scored.
    """

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nats); infinite where float64 cannot hold it."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.nats))


def perplexity(
    params: Params,
    tokens: Sequence[int] | np.ndarray,
    *,
    window: int = 512,
    stride: int | None = None,
    rows: int = 1,
    activation: Activation = "a16",
    cache_bits: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of one text. Every token counts once, in the first window that reaches it.

    By default windows are disjoint, as in the papers on quantization. A smaller stride gives every
    token at least window - stride tokens of context, and costs window / stride times as much.

    Args:
      params: the model.
      tokens: the text's token ids; at least two.
      window: tokens per window.
      stride: tokens from one window's start to the next's, at most `window`; None: `window`.
      rows: windows per pass.
      activation: activation precision, "a16", "a8" or "a4".
      cache_bits: bits per KV cache entry: 16, 8 or 4.
      progress: called with the passes done and the passes in all.

    Returns:
      The perplexity. The first token of the text has no context and is not scored; with disjoint
      windows neither is the first token of each.

    Raises:
      ValueError: an argument is out of its range.
    """
    text = np.asarray(tokens, np.int32)
    stride = window if stride is None else stride
    check_activation(activation)
    check_cache_bits(cache_bits)
    _check(params, text, window, stride, rows)
    rows = min(rows, whole_rows(params.mesh, -(-(len(text) - 1) // stride)))
    batches = list(_batches(text, window, stride, rows))
    total, count = 0.0, 0
    for done, (batch, counted) in enumerate(batches, start=1):
        log_probs, _ = score_tokens(params, batch, activation=activation, cache_bits=cache_bits)
        total -= float(np.sum(np.asarray(log_probs, np.float64), where=counted))
        count += int(counted.sum())
        if progress is not None:
            progress(done, len(batches))
    return Perplexity(total / count, count)


def _batches(
    text: np.ndarray, window: int, stride: int, rows: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields windows, int32[rows, window], and which scores count, bool[rows, window - 1]."""
    windows, counts = [], []
    reached = 1  # the first token is never scored
    for start in range(0, len(text) - 1, stride):
        part = text[start : start + window]
        places = start + np.arange(1, window)
        windows.append(np.pad(part, (0, window - len(part))))
        counts.append((places >= reached) & (places < len(text)))
        reached = start + len(part)
        if reached == len(text):
            break
    missing = -len(windows) % rows
    windows += [np.zeros(window, np.int32)] * missing
    counts += [np.zeros(window - 1, bool)] * missing
    for first in range(0, len(windows), rows):
        yield np.stack(windows[first : first + rows]), np.stack(counts[first : first + rows])


def _check(params: Params, text: np.ndarray, window: int, stride: int, rows: int) -> None:
    check_is_params(params)
    config = params.config
    if text.ndim != 1 or len(text) < 2:
        raise ValueError(f"tokens must be one text of at least two tokens, got shape {text.shape}")
    if text.min() < 0 or text.max() >= config.vocab_size:
        raise ValueError(
            f"tokens must be in 0 … {config.vocab_size - 1}, got {text.min()} … {text.max()}"
        )
    if not 2 <= window <= config.max_position_embeddings:
        raise ValueError(
            f"window must be between 2 and the model's {config.max_position_embeddings} positions, "
            f"got {window}"
        )
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be between 1 and window={window}, got {stride}")
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
