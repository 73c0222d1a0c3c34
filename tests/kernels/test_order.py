"""Weights whose columns are stored in another order, and 8-bit weights with zeros."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools import checkpoint
from pallas_kernels import operands
from pallas_kernels.cpu.matmul_call import available
from pallas_kernels.formats import (
    Int4Weight,
    Int8Weight,
    Quantized,
    int4_from_integers,
    int8_from_integers,
    integers,
    pack,
)
from pallas_kernels.matmul import matmul
from specjax.model.layers import Linear
from tests.support.compiled import dequantize
from tests.support.random_models import CONFIG, random_model
from tests.support.random_weights import random_int4, random_rows, with_outliers

N, K = 70, 300
IMPLEMENTATIONS = ["reference", *(["cpu"] if available() else [])]


def random_order(k: int) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(k).permutation(k), jnp.int32)


def int8_with_zeros(group_size: int | None) -> Int8Weight:
    """A weight with zeros from -128 to 127, so that q - zero needs nine bits."""
    rng = np.random.default_rng([N, K])
    groups = 1 if group_size is None else -(-K // group_size)
    return int8_from_integers(
        jnp.asarray(rng.integers(-128, 128, (N, K), dtype=np.int8)),
        jnp.asarray(rng.uniform(0.0005, 0.004, (N, groups)), jnp.float16),
        group_size,
        jnp.asarray(rng.integers(-128, 128, (N, groups), dtype=np.int8)),
    )


WEIGHTS: dict[str, Quantized] = {
    "int4": random_int4(N, K, 64),
    "int4 zeros": random_int4(N, K, 32, zeros=True),
    "int4 minima": random_int4(N, K, 32, minima=True),
    "int4 outliers": with_outliers(N, K),
    "int8 zeros": int8_with_zeros(64),
    "int8 zeros channel": int8_with_zeros(None),
}


def ordered(name: str) -> Int4Weight | Int8Weight:
    """A weight of WEIGHTS with a random column order. Outliers keep their zeros."""
    weight, order = WEIGHTS[name], random_order(K)
    stored = integers(weight)[:, :K][:, order]
    if isinstance(weight, Int4Weight):
        return dataclasses.replace(weight, packed=pack(stored), order=order)
    padded = jnp.pad(stored, ((0, 0), (0, weight.integers.shape[1] - K)))
    return dataclasses.replace(weight, integers=padded, order=order)


# Stored column j is the model's column order[j]. Outliers use the model's indices.
@pytest.mark.parametrize("name", WEIGHTS)
def test_dequantize_returns_the_models_columns(name: str) -> None:
    weight = ordered(name)
    stored = dequantize(dataclasses.replace(weight, order=None, **_without_outliers(weight)))
    values = np.zeros((N, K), np.float32)
    for j, column in enumerate(np.asarray(weight.order)):
        values[:, column] = stored[:, j]
    if getattr(weight, "outliers", None) is not None:
        values[:, weight.outliers.columns] += dequantize(weight.outliers.weight)
    np.testing.assert_array_equal(dequantize(weight), values)


def _without_outliers(weight: Quantized) -> dict[str, None]:
    return {"outliers": None} if isinstance(weight, Int4Weight) else {}


# With 16-bit activations the result is the product of the values.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.covering(1)
def test_product_is_that_of_the_values(name: str, dtype: str, implementation: str) -> None:
    weight, x = ordered(name), random_rows(9, K, dtype)
    y = matmul(x, weight, implementation=implementation)
    values, rows = np.asarray(dequantize(weight), np.float64), np.asarray(x, np.float64)
    # Rounding errors grow with the summed magnitudes, including those of the zeros.
    sums = np.abs(rows) @ np.abs(values).T + np.abs(rows) @ np.full_like(values, 128 * 0.004).T
    tolerance = 2**-8 if dtype == "bfloat16" else 2**-20
    assert np.all(np.abs(y - rows @ values.T) <= tolerance * sums)


# At every precision the result equals, bit for bit, the product of the reordered x and the stored
# columns, and a row does not depend on its neighbours.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ["a16", "a8", "a4"])
@pytest.mark.parametrize(
    "name", ["int4", "int4 zeros", "int4 minima", "int8 zeros", "int8 zeros channel"]
)
@pytest.mark.covering(1)
def test_order_only_moves_inputs(name: str, activation: str, implementation: str) -> None:
    weight, x = ordered(name), random_rows(9, K)
    y = matmul(x, weight, activation, implementation=implementation)
    stored = dataclasses.replace(weight, order=None)
    moved = matmul(x[:, weight.order], stored, activation, implementation=implementation)
    np.testing.assert_array_equal(y, moved)
    both = matmul(x[:1], (weight, stored), activation, implementation=implementation)
    np.testing.assert_array_equal(both[0], y[:1])


# Integer sums are exact, so the implementations differ only by the rounding of group sums.
@pytest.mark.skipif(not available(), reason="the C++ library was not built")
@pytest.mark.parametrize("activation", ["a8", "a4"])
@pytest.mark.parametrize("name", ["int8 zeros", "int8 zeros channel"])
def test_int8_zeros_agree(name: str, activation: str) -> None:
    x = random_rows(33, K)
    ours, reference = (
        np.asarray(matmul(x, WEIGHTS[name], activation, implementation=implementation))
        for implementation in ("cpu", "reference")
    )
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-5 * np.abs(reference).max())


def test_checkpoint_keeps_the_order(tmp_path: Path) -> None:
    params = random_model()
    k = CONFIG.hidden_size
    for weight in (
        dataclasses.replace(random_int4(CONFIG.vocab_size, k, 32), order=random_order(k)),
        dataclasses.replace(int8_like_head(), order=random_order(k)),
    ):
        changed = dataclasses.replace(params, lm_head=Linear(weight))
        checkpoint.save(changed, tmp_path / "model")
        loaded = checkpoint.load(tmp_path / "model").lm_head.weight
        for field in dataclasses.fields(weight):
            np.testing.assert_array_equal(
                getattr(loaded, field.name), getattr(weight, field.name), strict=True
            )


def int8_like_head() -> Int8Weight:
    weight = int8_with_zeros(32)
    k = CONFIG.hidden_size
    zeros = jnp.resize(weight.zeros, (CONFIG.vocab_size, 2))
    scales = jnp.resize(weight.scales, zeros.shape)
    q = jnp.resize(weight.integers, (CONFIG.vocab_size, k))
    return int8_from_integers(q, scales, 32, zeros)


def test_refusals(wrong_types: None) -> None:
    q, scales = jnp.zeros((2, 40), jnp.int8), jnp.ones((2, 1))
    for build in (int4_from_integers, int8_from_integers):
        with pytest.raises(ValueError, match=r"order must be int32\[40\], got int32\[39\]"):
            build(q, scales, None, order=jnp.arange(39, dtype=jnp.int32))
        with pytest.raises(ValueError, match=r"order must be int32\[40\], got float32\[40\]"):
            build(q, scales, None, order=jnp.ones(40))
    # GPU and TPU kernels reject weights that only `matmul` handles.
    for weight, what in ((ordered("int4"), "no order"), (WEIGHTS["int8 zeros"], "no zeros")):
        with pytest.raises(ValueError, match=f"must have {what} here"):
            operands.check(random_rows(1, K), weight, "a16")
