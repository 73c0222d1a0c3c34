"""Applies a function to some rows of a matrix at a time, to limit the memory of intermediates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

WEIGHTS_AT_ONCE = 2**24

Result = TypeVar("Result")


def over_rows(function: Callable[[jax.Array], Result], weight: jax.Array) -> Result:
    """Calls `function` with some rows of `weight` at a time and concatenates its arrays.

    Args:
      function: from [rows, K] to a pytree of arrays whose first axis is the rows.
      weight: [N, K].

    Returns:
      The pytree for all N rows.
    """
    step = max(WEIGHTS_AT_ONCE // weight.shape[1], 1)
    parts = [function(weight[i : i + step]) for i in range(0, weight.shape[0], step)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *p: jnp.concatenate(p), *parts)
