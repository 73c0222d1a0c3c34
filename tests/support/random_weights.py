"""One random weight of every format that `matmul` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.bfloat12 import Bfloat12Weight, bfloat12
from pallas_kernels.formats import (
    Int4Weight,
    Outliers,
    int4_from_integers,
    int8_from_integers,
    mxfp4_from_codes,
    plain_weight,
)
from pallas_kernels.planes import LARGEST, SMALLEST, nested_int8_from_integers
from pallas_kernels.weights import Weight

FORMATS = (
    "int4-32", "int4-64", "int4-128", "int4-channel",
    "int4-32-zeros", "int4-128-zeros", "int4-channel-zeros",
    "int4-32-minima", "int4-channel-minima", "int4-outliers",
    "mxfp4",
    "int8-64", "int8-32-minima", "int8-channel", "nested8-64", "nested8-channel",
    "bfloat16", "float32", "bfloat12",
)  # fmt: skip
# One of each kind; the first ones meet every implementation where `covering` pairs the two.
SOME = (*FORMATS[:5], "int4-32-minima", "mxfp4", "int8-64", "nested8-64", "bfloat16")


def rounded(values: np.ndarray, dtype: DTypeLike) -> jax.Array:
    """Values in `dtype`, rounded by NumPy: JAX would compile a program for every shape."""
    return jax.device_put(values.astype(np.float32).astype(dtype))


def random_int4(
    n: int,
    k: int,
    group_size: int | None = 128,
    dtype: str = "bfloat16",
    zeros: bool = False,
    minima: bool = False,
) -> Int4Weight:
    """A weight with every integer from -8 to 7. Scales vary by a factor of eight between groups."""
    rng = np.random.default_rng([n, k])
    groups = 1 if group_size is None else -(-k // group_size)
    scales = rounded(rng.uniform(0.005, 0.04, (n, groups)), dtype)
    q = jax.device_put(rng.integers(-8, 8, (n, k), dtype=np.int8))
    points = jax.device_put(rng.integers(-8, 8, (n, groups), dtype=np.int8)) if zeros else None
    least = random_minima(scales, 16) if minima else None
    return int4_from_integers(q, scales, group_size, points, minima=least)


def random_minima(scales: jax.Array, levels: int) -> jax.Array:
    """Values of the smallest integer, from -levels · scale to scale."""
    rng = np.random.default_rng(scales.shape)
    least = rng.uniform(-levels, 1, scales.shape) * np.asarray(scales, np.float64)
    return rounded(least, scales.dtype)


def with_outliers(n: int, k: int) -> Int4Weight:
    """Moves a few columns, ten times as large as the others, to 8 bits."""
    rng = np.random.default_rng([n, k, 1])
    weight = random_int4(n, k)
    columns = jnp.asarray(np.sort(rng.choice(k, size=min(k, 20), replace=False)), jnp.int32)
    q = jax.device_put(rng.integers(-8, 8, (n, k), dtype=np.int8)).at[:, columns].set(0)
    inner = int4_from_integers(q, weight.scales[:, : -(-k // 128)])
    outer = int8_from_integers(
        jax.device_put(rng.integers(-127, 128, (n, columns.size), dtype=np.int8)),
        rounded(rng.uniform(0.005, 0.02, (n, 1)), jnp.float32),
    )
    return dataclasses.replace(inner, outliers=Outliers(columns, outer))


@lru_cache
def random_weight(name: str, n: int, k: int) -> Weight:
    """A weight (n, k) of one format."""
    rng = np.random.default_rng([n, k, 2])

    def integers(low: int, high: int, dtype: type = np.int8) -> jax.Array:
        return jax.device_put(rng.integers(low, high, (n, k), dtype))

    def scales(group_size: int | None, dtype: str) -> jax.Array:
        groups = 1 if group_size is None else -(-k // group_size)
        return rounded(rng.uniform(0.0005, 0.004, (n, groups)), dtype)

    def mxfp4() -> Weight:
        exponents = rng.integers(120, 125, (n, -(-k // 32)), dtype=np.uint8)
        return mxfp4_from_codes(integers(0, 16, np.uint8), jax.device_put(exponents))

    def int8(group_size: int | None, dtype: str = "float32", minima: bool = False) -> Weight:
        each = scales(group_size, dtype)
        least = random_minima(each, 256) if minima else None
        return int8_from_integers(integers(-128, 128), each, group_size, minima=least)

    def nested8(group_size: int | None, dtype: str) -> Weight:
        sixteenths = integers(SMALLEST, LARGEST + 1)
        return nested_int8_from_integers(sixteenths, scales(group_size, dtype), group_size)

    def values(dtype: str) -> jax.Array:
        return rounded(rng.normal(size=(n, k)) * 0.05, dtype)

    make: dict[str, Callable[[], Weight]] = {
        "int4-32": lambda: random_int4(n, k, 32, "float16"),
        "int4-64": lambda: random_int4(n, k, 64, "float32"),
        "int4-128": lambda: random_int4(n, k, 128),
        "int4-channel": lambda: random_int4(n, k, None),
        "int4-32-zeros": lambda: random_int4(n, k, 32, zeros=True),
        "int4-128-zeros": lambda: random_int4(n, k, 128, zeros=True),
        "int4-channel-zeros": lambda: random_int4(n, k, None, "float32", zeros=True),
        "int4-32-minima": lambda: random_int4(n, k, 32, "float16", minima=True),
        "int4-channel-minima": lambda: random_int4(n, k, None, "float32", minima=True),
        "int4-outliers": lambda: with_outliers(n, k),
        "mxfp4": mxfp4,
        "int8-64": lambda: int8(64),
        "int8-32-minima": lambda: int8(32, "float16", minima=True),
        "int8-channel": lambda: int8(None),
        "nested8-64": lambda: nested8(64, "bfloat16"),
        "nested8-channel": lambda: nested8(None, "float32"),
        "bfloat16": lambda: plain_weight(values("bfloat16")),
        "float32": lambda: values("float32"),
        "bfloat12": lambda: random_bfloat12(n, k),
    }
    assert tuple(make) == FORMATS
    return make[name]()


def random_weights(n: int, k: int) -> dict[str, Weight]:
    """A weight (n, k) of every format."""
    return {name: random_weight(name, n, k) for name in FORMATS}


def random_bits(n: int, k: int, escapes: float = 0.003) -> np.ndarray:
    """Normal weights as the bits of bfloat16; a share of them are zeros or a millionth as large."""
    rng = np.random.default_rng([n, k, 3])
    values = rng.normal(size=(n, k)) * 0.05
    values *= rng.choice([1, 0, 1e-6], (n, k), p=[1 - escapes, escapes / 2, escapes / 2])
    return np.asarray(rounded(values, jnp.bfloat16)).view(np.uint16)


def random_bfloat12(n: int, k: int) -> Bfloat12Weight:
    """The weight of `random_bits`."""
    weight, _ = bfloat12(random_bits(n, k), most_escapes=1)
    assert weight is not None
    return weight


def random_rows(m: int, k: int, dtype: str = "bfloat16") -> jax.Array:
    """Rows of different magnitudes: [M, K]."""
    rng = np.random.default_rng([m, k])
    return rounded(rng.normal(size=(m, k)) * rng.uniform(0.1, 10, (m, 1)), dtype)
