"""Suffix matches: what followed the longest earlier occurrence of a text's last tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class Match(NamedTuple):
    """An earlier occurrence of each row's last tokens.

    tokens: int32[B, N], the tokens that followed it.
    counts: int32[B], how many of them there are; 0 where nothing occurs again.
    length: int32[B], the last tokens that it shares, at most as many as were looked for.
    """

    tokens: jax.Array
    counts: jax.Array
    length: jax.Array


def longest_match(
    tokens: Int32[Array, "B W"], lengths: Int32[Array, " B"], longest: int, following: int
) -> Match:
    """Finds the longest earlier occurrence of the last tokens, and of equally long ones the last.

    Args:
      tokens: int32[B, W], texts; the first lengths: int32[B] tokens of each are valid.
      longest: the most last tokens to compare.
      following: N, the tokens to return after the occurrence.
    """
    width = tokens.shape[1]
    ends = jnp.arange(width)
    run = shared_run(tokens, lengths, longest)
    run = jnp.where(ends < lengths[:, None] - 1, run, 0)
    # One maximum finds both: the longest run, and the last place among equals.
    best = jnp.max(run * width + ends, axis=1)
    length, end = best // width, best % width
    places = end[:, None] + 1 + jnp.arange(following)
    found = jnp.take_along_axis(tokens, jnp.minimum(places, width - 1), axis=1)
    counts = jnp.where(length > 0, jnp.minimum(lengths - 1 - end, following), 0)
    return Match(found, counts, length)


def shared_run(
    tokens: Int32[Array, "B W"], lengths: Int32[Array, " B"], longest: int
) -> Int32[Array, "B W"]:
    """Counts the tokens up to each place that equal the text's last, at most `longest`.

    int32[B, W], int32[B] -> int32[B, W].
    """
    run, same = jnp.zeros_like(tokens), jnp.bool_(True)
    for back in range(longest):
        there = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, : tokens.shape[1]]
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1 - back, axis=1, mode="clip")
        same &= (there == last) & (back < lengths[:, None])
        run += same
    return run
