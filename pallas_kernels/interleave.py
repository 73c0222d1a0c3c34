"""Interleaves the rows of weights, the layout that CPUs read fastest.

Sequential reads are the fastest, and a vector register multiplies one word (4 bytes) of inputs for
each of several adjacent outputs. The words of TILE rows are therefore stored side by side:

    [N, C] -> [ceil(N / TILE), C / per_word, TILE · per_word],  per_word values in a word

Scales, zeros and minima count as words of one value. The last tile is padded with rows of zeros.
`by_rows` is the exact inverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import Bfloat12Weight, some_bits
from pallas_kernels.formats import Bfloat16Weight
from pallas_kernels.nested import NestedWeight
from pallas_kernels.weights import Weight

# The arrays of a weight that have a row per output, and the number of their values in a word.
PER_WORD = {"packed": 4, "rest": 4, "integers": 4, "bits": 2, "scales": 1, "zeros": 1, "minima": 1}

AnyWeight = TypeVar("AnyWeight", bound=Weight)


def interleave(weight: AnyWeight) -> AnyWeight:
    """Interleaves the rows of a weight.

    Plain arrays are returned unchanged, and so are matrices whose rows are not whole words.
    """
    if isinstance(weight, NestedWeight):
        return cast(AnyWeight, _both_planes(weight, interleave))
    if isinstance(weight, jax.Array) or is_interleaved(weight):
        return weight
    if any(array.shape[1] % per_word for _, array, per_word in _matrices(weight)):
        return weight
    arrays = {name: _interleave(array, per_word) for name, array, per_word in _matrices(weight)}
    interleaved: AnyWeight = _replace(weight, interleave, out_features=weight.shape[0], **arrays)
    return interleaved


def is_interleaved(weight: Weight) -> bool:
    """Whether a weight's rows are interleaved."""
    if isinstance(weight, NestedWeight):
        return is_interleaved(weight.exact) and is_interleaved(weight.draft)
    return not isinstance(weight, jax.Array) and weight.out_features is not None


def by_rows(weight: AnyWeight) -> AnyWeight:
    """Stores a weight row by row: the inverse of `interleave`.

    A `Bfloat12Weight` has no other order and is returned unchanged.
    """
    if isinstance(weight, NestedWeight):
        return cast(AnyWeight, _both_planes(weight, by_rows))
    if not is_interleaved(weight) or isinstance(weight, Bfloat12Weight):
        return weight
    n = weight.shape[0]
    arrays = {name: _by_rows(array, per_word)[:n] for name, array, per_word in _matrices(weight)}
    stored: AnyWeight = _replace(weight, by_rows, out_features=None, **arrays)
    return stored


def some_rows(weight: Weight, indices: jax.Array) -> Weight:
    """Returns some rows of a weight, stored row by row.

    Args:
      weight: (N, K), interleaved or not; not a plain array.
      indices: int[R], in 0 … N - 1.

    Returns:
      (R, K). Those of a `Bfloat12Weight` are a `Bfloat16Weight`; those of a `NestedWeight` are its
      exact plane's.
    """
    if isinstance(weight, NestedWeight):
        return some_rows(weight.exact, indices)
    if isinstance(weight, Bfloat12Weight):
        return Bfloat16Weight(some_bits(weight, indices))

    def take(array: jax.Array, per_word: int) -> jax.Array:
        if not is_interleaved(weight):
            return array[indices]
        tiles, words, _ = array.shape
        rows = array.reshape(tiles, words, TILE, per_word)[indices // TILE, :, indices % TILE]
        return rows.reshape(len(indices), words * per_word)

    arrays = {name: take(array, per_word) for name, array, per_word in _matrices(weight)}
    change = partial(some_rows, indices=indices)
    rows: Weight = _replace(weight, change, out_features=None, **arrays)
    return rows


def _both_planes(weight: NestedWeight, change: Callable[[Any], Any]) -> NestedWeight:
    return NestedWeight(change(weight.exact), change(weight.draft))


def _matrices(weight: Any) -> Iterator[tuple[str, jax.Array, int]]:
    """The arrays that have a row per output, as (name, array, values in a word)."""
    for name, per_word in PER_WORD.items():
        array = getattr(weight, name, None)
        if array is not None:
            yield name, array, per_word


def _replace(weight: Any, change: Callable[[Weight], Weight], **fields: Any) -> Any:
    """Replaces fields of a weight and applies `change` to its outliers."""
    outliers = getattr(weight, "outliers", None)
    if outliers is not None:
        fields["outliers"] = dataclasses.replace(outliers, weight=change(outliers.weight))
    return dataclasses.replace(weight, **fields)


def _interleave(values: jax.Array, per_word: int) -> jax.Array:
    n, c = values.shape
    padding = ((0, -n % TILE), (0, 0))
    traced = isinstance(values, jax.core.Tracer)  # NumPy serves concrete arrays without compiling
    padded: Any = jnp.pad(values, padding) if traced else np.pad(np.asarray(values), padding)
    words = padded.reshape(-1, TILE, c // per_word, per_word)
    tiles = words.swapaxes(1, 2).reshape(-1, c // per_word, TILE * per_word)
    interleaved: jax.Array = tiles if traced else jax.device_put(tiles)
    return interleaved


@partial(jax.jit, static_argnames="per_word")
def _by_rows(values: jax.Array, per_word: int) -> jax.Array:
    tiles, words, _ = values.shape
    rows = values.reshape(tiles, words, TILE, per_word).swapaxes(1, 2)
    return rows.reshape(tiles * TILE, words * per_word)
