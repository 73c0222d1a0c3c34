"""Checks and parts of the operands of accelerator matrix kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from types import UnionType
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Activation, check_activation
from pallas_kernels.formats import PLANE, Int8Weight, Quantized
from pallas_kernels.rounding import check_float
from pallas_kernels.weight_checks import check_arrays
from pallas_kernels.weights import Rounded, check_plain_columns

Product = TypeVar("Product")


def check(
    x: jax.Array, weight: Rounded, activation: Activation, formats: UnionType = Quantized
) -> None:
    """Raises ValueError unless x: bf16 or f32[M, K] matches the weight and neither is empty.

    The weight must have one of the formats that the kernel serves, and its arrays the shapes and
    dtypes of its format.
    """
    check_activation(activation)
    if not isinstance(weight, formats):
        names = ", ".join(each.__name__ for each in get_args(formats))
        raise ValueError(f"weight must be one of {names}, got {type(weight).__name__}")
    n, k = weight.shape
    if x.ndim != 2 or x.shape[1] != k or 0 in (x.shape[0], n, k):
        raise ValueError(f"x of shape {x.shape} cannot be multiplied by a weight of {(n, k)}")
    check_float("x", x.dtype)
    if isinstance(weight, Int8Weight) and weight.zeros is not None:
        raise ValueError("weight of 8 bits must have no zeros here, got some")
    check_plain_columns(weight)
    check_arrays(weight)


def by_kind(
    kinds: Sequence[Hashable], multiply: Callable[[list[int]], Iterable[Product]]
) -> tuple[Product, ...]:
    """Calls multiply(places) once for the places of every kind; returns the results by place."""
    found: dict[int, Product] = {}
    for kind in dict.fromkeys(kinds):
        places = [place for place, each in enumerate(kinds) if each == kind]
        found |= zip(places, multiply(places), strict=True)
    return tuple(found[place] for place in range(len(kinds)))


def group_parts(weight: Rounded) -> dict[str, jax.Array]:
    """The weight's scales, and its zeros or minima if any: [N, groups] by name."""
    parts = {name: getattr(weight, name, None) for name in ("scales", "zeros", "minima")}
    return {name: part for name, part in parts.items() if part is not None}


def group_sums(values: jax.Array, group_size: int | None) -> jax.Array:
    """Sums each group of x: [M, K] -> f32[M, groups], by halves, in one order for every M."""
    parts = values.astype(jnp.float32).reshape(values.shape[0], -1, group_size or PLANE)
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[:, :, :half] + parts[:, :, half:]
    sums = parts[:, :, 0]
    if group_size is not None:
        return sums
    total = sums[:, :1]  # exact for integers: at most 127 · K < 2^24
    for i in range(1, sums.shape[1]):
        total += sums[:, i : i + 1]
    return total


def product_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which products of operands of `dtype` are summed within a group."""
    return np.dtype(np.int32 if dtype == np.int8 else np.float32)
