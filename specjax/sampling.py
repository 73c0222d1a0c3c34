"""From logits to tokens: the greedy choice, and the distribution that is sampled."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_integer

GREEDY_BLOCK = 128  # tokens; divides the vocabularies of nearly all models


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; decoding without one is greedy.

    Applied in Hugging Face's order: repetition penalty, temperature, top-k, top-p, min-p.

    temperature: divides the logits; in [1e-6, 1e6].
    top_k: keep the k most probable tokens; None keeps all.
    top_p: keep the fewest most probable tokens whose probability reaches top_p; None keeps all.
    min_p: keep the tokens at least min_p times as probable as the most probable one; None keeps
        all.
    repetition_penalty: divides the positive logits, and multiplies the negative ones, of the tokens
        that the prompt or the output holds already (Keskar et al. 2019); None leaves them. With
        top_k=1 it penalizes greedy decoding.

    Raises ValueError where a field is out of its range.
    """

    temperature: float = dataclasses.field(default=1.0, metadata={"static": True})
    top_k: int | None = dataclasses.field(default=None, metadata={"static": True})
    top_p: float | None = dataclasses.field(default=None, metadata={"static": True})
    min_p: float | None = dataclasses.field(default=None, metadata={"static": True})
    repetition_penalty: float | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 1e-6 <= self.temperature <= 1e6:
            raise ValueError(
                f"temperature must be in [1e-6, 1e6], got {self.temperature!r}; "
                "leave `sampling` out to decode greedily"
            )
        if self.top_k is not None and check_integer("top_k", self.top_k) < 1:
            raise ValueError(f"top_k must be at least 1 or None, got {self.top_k}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be in (0, 1] or None, got {self.top_p!r}")
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must be in [0, 1] or None, got {self.min_p!r}")
        penalty = self.repetition_penalty
        if penalty is not None and not (_is_number(penalty) and 1e-6 <= penalty <= 1e6):
            raise ValueError(f"repetition_penalty must be in [1e-6, 1e6] or None, got {penalty!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def greedy(logits: jax.Array) -> jax.Array:
    """The most probable token, the first of equals. f32[..., V] -> int32[...].

    By blocks, because XLA:CPU finds a maximum with vectors and its place without: first the block
    that has it, then its place in the block. That is some twenty times faster.
    """
    vocabulary = logits.shape[-1]
    if vocabulary % GREEDY_BLOCK != 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    blocks = logits.reshape(*logits.shape[:-1], -1, GREEDY_BLOCK)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * GREEDY_BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def probabilities(
    logits: jax.Array, sampling: Sampling, seen: jax.Array | None = None
) -> jax.Array:
    """The distribution that `sampling` draws from. f32[..., V] -> f32[..., V], sums of 1.

    seen: bool[..., V], the tokens that a repetition penalty is for; needed where there is one.
    """
    if sampling.repetition_penalty is not None:
        assert seen is not None
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    # The maximum goes first, so that it is exactly 0 however small the temperature.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits = _keep(logits, jnp.arange(logits.shape[-1]) < sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        descending = jnp.sort(jax.nn.softmax(logits), axis=-1, descending=True)
        before = jnp.cumsum(descending, axis=-1) - descending
        logits = _keep(logits, before < sampling.top_p)
    if sampling.min_p is not None:
        kept = jax.nn.softmax(logits)
        most = jnp.max(kept, axis=-1, keepdims=True)
        logits = jnp.where(kept < sampling.min_p * most, -jnp.inf, logits)
    return jax.nn.softmax(logits)


def seen_tokens(
    tokens: jax.Array,
    lengths: jax.Array,
    following: jax.Array,
    vocab_size: int,
    ancestors: jax.Array | None = None,
) -> jax.Array:
    """Which tokens a row holds before each of its next places.

    Args:
      tokens: int32[B, W], of which the first lengths: int32[B] are the row's.
      following: int32[B, N], what is drafted to come after them.
      ancestors: int32[B, N, D], of a tree: the drafts on the path to each, padded with -1.

    Returns:
      bool[B, N + 1, V].
    """
    rows, width = tokens.shape
    valid = jnp.where(jnp.arange(width) < lengths[:, None], tokens, vocab_size)  # the rest drops
    before = jnp.zeros((rows, vocab_size), bool)
    before = before.at[jnp.arange(rows)[:, None], valid].set(True, mode="drop")
    if ancestors is not None:
        path = jnp.take_along_axis(following[:, None], jnp.maximum(ancestors, 0), axis=2)
        path = jnp.where(ancestors >= 0, path, vocab_size)
        b, n, _ = ancestors.shape
        seen = jnp.broadcast_to(before[:, None], (b, n + 1, vocab_size))
        place = jnp.arange(b)[:, None, None], jnp.arange(1, n + 1)[:, None], path
        return seen.at[place].set(True, mode="drop")
    drafted = jax.nn.one_hot(following, vocab_size, dtype=jnp.bool_)
    seen = jnp.concatenate((before[:, None], drafted), axis=1)
    return lax.associative_scan(jnp.logical_or, seen, axis=1)


def _keep(logits: jax.Array, kept_ranks: jax.Array) -> jax.Array:
    """-inf for the tokens whose rank by falling logit (ties: by token id) is not kept."""
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranks = jnp.argsort(order, axis=-1)
    kept = jnp.take_along_axis(jnp.broadcast_to(kept_ranks, logits.shape), ranks, axis=-1)
    return jnp.where(kept, logits, -jnp.inf)


def draw(keys: jax.Array, distribution: jax.Array) -> jax.Array:
    """One token per row, each with its own key. keys: [B], f32[B, V] -> int32[B]."""
    return jax.vmap(jax.random.categorical)(keys, jnp.log(distribution)).astype(jnp.int32)
