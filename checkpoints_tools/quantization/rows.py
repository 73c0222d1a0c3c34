"""A matrix's rows a part at a time, so that what is computed on the way needs little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

WEIGHTS_AT_ONCE = 2**24

Result = TypeVar("Result")


def over_rows(function: Callable[[jax.Array], Result], weight: jax.Array) -> Result:
    """`function(rows)` of some rows of `weight` at a time, its arrays put together row by row.

    weight: [N, K]. The arrays that `function` returns have the given rows as their first axis.
    """
    step = max(WEIGHTS_AT_ONCE // weight.shape[1], 1)
    parts = [function(weight[i : i + step]) for i in range(0, weight.shape[0], step)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *p: jnp.concatenate(p), *parts)
