"""Calls of the C++ library under vmap: operands that are batched, and those that all share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def as_rows(operands: Any, in_batched: Any, size: int) -> Any:
    """Flattens [N, B, ...] to [N · B, ...], and repeats an unbatched [B, ...] N times.

    operands: a tree of arrays. in_batched: the same tree of bools. size: N.
    """

    def flat(x: jax.Array, is_batched: bool) -> jax.Array:
        x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        return x.reshape(-1, *x.shape[2:])

    return jax.tree.map(flat, operands, in_batched)


def entry(operands: Any, in_batched: Any, index: jax.Array) -> Any:
    """The operands of one call in the batch. Arguments as in `as_rows`; index: int32[]."""
    return jax.tree.map(lambda x, is_batched: x[index] if is_batched else x, operands, in_batched)
