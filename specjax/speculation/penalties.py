"""Changes of logits before the temperature: biases, and penalties on tokens that came before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from pallas_kernels.rounding import rounded_product
from specjax.checks import check_integer, check_number, shown

_MOST_BIAS = 100.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LogitBias:
    """Numbers that are added to the logits of some tokens.

    ids: int32[B, K], one list of tokens per row, or [K], one list for all rows; -1 is not a token.
    values: f32[B, K] or [K], theirs.
    """

    ids: Any
    values: Any

    @classmethod
    def of(cls, mappings: Sequence[Mapping[int, float]], width: int = 0) -> LogitBias:
        """Returns the biases of several rows, f32[B, K].

        Args:
          mappings: token ids to biases in [-100, 100], one mapping per row.
          width: the least K. Lists of one width share a compiled program.

        Raises:
          ValueError: an id is not an integer from 0 on, or a bias is out of its range.
        """
        for mapping in mappings:
            if not isinstance(mapping, Mapping):
                raise ValueError(
                    f"logit_bias must map token ids to numbers, one mapping or one per row, "
                    f"got {shown(mapping)}"
                )
        width = max(width, 1, *map(len, mappings))
        width = 1 << (width - 1).bit_length()
        ids = np.full((len(mappings), width), -1, np.int32)
        values = np.zeros((len(mappings), width), np.float32)
        for row, mapping in enumerate(mappings):
            for place, (token, bias) in enumerate(mapping.items()):
                ids[row, place], values[row, place] = _check_token(token), _check_bias(bias)
        return cls(ids, values)

    def dense(self, vocab_size: int) -> jax.Array:
        """Returns the bias of every token. f32[B, V], or [1, V] for all rows."""
        ids, values = jnp.atleast_2d(self.ids), jnp.atleast_2d(self.values)
        ids = jnp.where(ids < 0, vocab_size, ids)  # the rest drops
        rows = jnp.arange(ids.shape[0])[:, None]
        return jnp.zeros((ids.shape[0], vocab_size)).at[rows, ids].add(values, mode="drop")

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError if a token is outside the vocabulary. A traced one is not checked."""
        if isinstance(self.ids, jax.core.Tracer):
            return
        most = int(np.max(self.ids, initial=-1))
        if most >= size:
            raise ValueError(
                f"logit_bias holds token {most}, outside the vocabulary of {size} entries"
            )


def read_logit_bias(given: Any) -> LogitBias | None:
    """Returns what `Sampling` was given as `logit_bias`; None where it biases nothing.

    Raises ValueError unless it is a mapping, a list of mappings, or a `LogitBias`, and where a
    token or a bias is out of its range. Traced ones are not checked.
    """
    if given is None:
        return None
    if isinstance(given, LogitBias):
        return _checked(given)
    if isinstance(given, Mapping):
        one = LogitBias.of([given])
        return LogitBias(one.ids[0], one.values[0]) if given else None
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        given = [given]
    return LogitBias.of(given)


def _checked(bias: LogitBias) -> LogitBias:
    ids, values = bias.ids, bias.values
    if isinstance(ids, jax.core.Tracer) or isinstance(values, jax.core.Tracer):
        return bias
    arrays = all(isinstance(each, np.ndarray | jax.Array) for each in (ids, values))
    if not arrays or ids.ndim not in (1, 2) or ids.shape != values.shape:
        raise ValueError(
            "a LogitBias must have arrays as ids and values, both [K] or [B, K], got "
            f"{shown(ids)} and {shown(values)}"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids of a LogitBias must be integers, got {ids.dtype}")
    if not np.all(np.abs(np.asarray(values)) <= _MOST_BIAS):
        raise ValueError("values of a LogitBias must be in [-100, 100]")
    return bias


def _check_token(token: Any) -> int:
    found = check_integer("a token of logit_bias", token)
    if not 0 <= found < 2**31:
        raise ValueError(f"a token of logit_bias must be a token id, got {found}")
    return found


def _check_bias(bias: Any) -> float:
    found = check_number("a bias of logit_bias", bias)
    if not abs(found) <= _MOST_BIAS:
        raise ValueError(f"a bias of logit_bias must be in [-100, 100], got {found}")
    return found


class Earlier(NamedTuple):
    """The tokens that a row holds before some places; None: no penalty asks.

    seen: bool[..., V], whether prompt or output holds each.
    counts: int32[..., V], how often the output holds each.
    """

    seen: jax.Array | None = None
    counts: jax.Array | None = None

    def at(self, place: int) -> Earlier:
        """The tokens before one place. [B, N, V] -> [B, V]."""
        there: Earlier = jax.tree.map(lambda leaf: leaf[:, place], self)
        return there

    def and_then(self, tokens: Int32[Array, " B"]) -> Earlier:
        """The tokens before the place after these, from the ones before theirs, [B, V]."""
        seen, counts = self
        place = jnp.arange(tokens.shape[0]), tokens
        return Earlier(
            None if seen is None else seen.at[place].set(True),
            None if counts is None else counts.at[place].add(1),
        )


NOTHING = Earlier()


def count_tokens(
    tokens: Int32[Array, "B W"],
    begins: Int32[Array, " B"],
    ends: Int32[Array, " B"],
    following: Int32[Array, "B N"],
    vocab_size: int,
    ancestors: Int32[Array, "B N depth"] | None = None,
) -> Int32[Array, "B N+1 {vocab_size}"]:
    """Counts the tokens of a row before each of its next places.

    Args:
      tokens: int32[B, W]; those at begins … ends - 1, int32[B] each, count.
      following: int32[B, N], the drafts that follow them.
      ancestors: int32[B, N, D], for a tree: the drafts on the path to each, padded with -1.

    Returns:
      int32[B, N + 1, V].
    """
    rows, width = tokens.shape
    place = jnp.arange(width)
    inside = (begins[:, None] <= place) & (place < ends[:, None])
    valid = jnp.where(inside, tokens, vocab_size)  # the rest drops
    before = jnp.zeros((rows, vocab_size), jnp.int32)
    before = before.at[jnp.arange(rows)[:, None], valid].add(1, mode="drop")
    if ancestors is None:
        drafted = jax.nn.one_hot(following, vocab_size, dtype=jnp.int32)
        return jnp.cumsum(jnp.concatenate((before[:, None], drafted), axis=1), axis=1)
    path = jnp.take_along_axis(following[:, None], jnp.maximum(ancestors, 0), axis=2)
    path = jnp.where(ancestors >= 0, path, vocab_size)
    b, n, _ = ancestors.shape
    counts = jnp.broadcast_to(before[:, None], (b, n + 1, vocab_size))
    nodes = jnp.arange(b)[:, None, None], jnp.arange(1, n + 1)[:, None], path
    return counts.at[nodes].add(1, mode="drop")


def penalize(
    logits: Float32[Array, "*B V"],
    earlier: Earlier,
    *,
    bias: LogitBias | None,
    repetition: Any,
    presence: Any,
    frequency: Any,
) -> Float32[Array, "*B V"]:
    """Adds the bias, then applies the penalties. f32[..., V] -> f32[..., V].

    Those that are None change nothing; the others are fields of `Sampling`.
    """
    if bias is not None:
        values = bias.dense(logits.shape[-1])
        logits += values.reshape(values.shape[0], *(1,) * (logits.ndim - 2), values.shape[1])
    if repetition is not None:
        assert earlier.seen is not None
        factor = beside(repetition, logits)
        changed = jnp.where(logits < 0, logits * factor, logits / factor)
        logits = jnp.where(earlier.seen, changed, logits)
    if presence is not None:
        assert earlier.counts is not None
        logits -= jnp.where(earlier.counts > 0, beside(presence, logits), 0)
    if frequency is not None:
        assert earlier.counts is not None
        counts = earlier.counts.astype(jnp.float32)
        logits -= rounded_product(counts, beside(frequency, logits))
    return logits


def beside(value: Any, logits: jax.Array) -> jax.Array:
    """A field's values beside the logits of their rows: f32[] or f32[B, 1, …]."""
    values = jnp.asarray(value, jnp.float32)
    return values.reshape(*values.shape, *(1,) * (logits.ndim - values.ndim))
