"""From logits to tokens: the greedy choice, and the distribution that is sampled."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.checks import check_integer

GREEDY_BLOCK = 128  # tokens; divides the vocabularies of nearly all models


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; decoding without one is greedy.

    Applied in Hugging Face's order: temperature, then top-k, then top-p.

    temperature: divides the logits; in [1e-6, 1e6].
    top_k: keep the k most probable tokens; None keeps all.
    top_p: keep the fewest most probable tokens whose probability reaches top_p; None keeps all.

    Raises ValueError where a field is out of its range.
    """

    temperature: float = dataclasses.field(default=1.0, metadata={"static": True})
    top_k: int | None = dataclasses.field(default=None, metadata={"static": True})
    top_p: float | None = dataclasses.field(default=None, metadata={"static": True})

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


def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The distribution that `sampling` draws from. f32[..., V] -> f32[..., V], sums of 1."""
    # The maximum goes first, so that it is exactly 0 however small the temperature.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits = _keep(logits, jnp.arange(logits.shape[-1]) < sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        descending = jnp.sort(jax.nn.softmax(logits), axis=-1, descending=True)
        before = jnp.cumsum(descending, axis=-1) - descending
        logits = _keep(logits, before < sampling.top_p)
    return jax.nn.softmax(logits)


def _keep(logits: jax.Array, kept_ranks: jax.Array) -> jax.Array:
    """-inf for the tokens whose rank by falling logit (ties: by token id) is not kept."""
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranks = jnp.argsort(order, axis=-1)
    kept = jnp.take_along_axis(jnp.broadcast_to(kept_ranks, logits.shape), ranks, axis=-1)
    return jnp.where(kept, logits, -jnp.inf)


def draw(keys: jax.Array, distribution: jax.Array) -> jax.Array:
    """One token per row, each with its own key. keys: [B], f32[B, V] -> int32[B]."""
    return jax.vmap(jax.random.categorical)(keys, jnp.log(distribution)).astype(jnp.int32)
