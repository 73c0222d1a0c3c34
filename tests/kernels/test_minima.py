"""Weights with minima have ggml's values, and invalid ones are rejected."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_gpu
from pallas_kernels.formats import Int4Weight, Int8Weight, int4_from_integers, int8_from_integers
from pallas_kernels.matmul import matmul
from pallas_kernels.weight_checks import check_arrays
from pallas_kernels.weight_values import dequantize
from tests.support.random_weights import random_int4, random_minima, random_rows, with_outliers

BUILDERS = {8: int4_from_integers, 128: int8_from_integers}  # by the offset of the integers


@pytest.mark.optimized
@pytest.mark.parametrize("least", BUILDERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_values_are_ggmls(least: int, dtype: str) -> None:
    # (q + least) · scale + minimum in float32, rounded after the product and after the sum. A
    # compiler must not fuse them.
    rng = np.random.default_rng(least)
    q = rng.integers(-least, least, (20, 300))
    scales = jnp.asarray(rng.uniform(0.005, 0.04, (20, 10)), dtype)
    minima = random_minima(scales, 2 * least)
    weight = BUILDERS[least](jnp.asarray(q, jnp.int8), scales, 32, minima=minima)
    wide = [
        np.repeat(np.asarray(each, np.float32), 32, axis=1)[:, :300] for each in (scales, minima)
    ]
    expected = (q + least).astype(np.float32) * wide[0] + wide[1]
    for values in (dequantize(weight), jax.jit(dequantize)(weight)):
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("build", BUILDERS.values())
def test_a_weight_is_built_of_what_fits(build, wrong_types: None) -> None:
    q, scales = jnp.zeros((2, 40), jnp.int8), jnp.ones((2, 2), jnp.float16)
    zeros = jnp.zeros((2, 2), jnp.int8)
    with pytest.raises(ValueError, match="a weight must have zeros or minima, got both"):
        build(q, scales, 32, zeros, minima=scales)
    with pytest.raises(ValueError, match=r"minima must have shape \(2, 2\), got \(2, 1\)"):
        build(q, scales, 32, minima=scales[:, :1])
    with pytest.raises(ValueError, match="minima must be float16, got float32"):
        build(q, scales, 32, minima=jnp.ones((2, 2)))


def both(bits: int) -> Int4Weight | Int8Weight:
    """A weight with zeros and minima, which the builders refuse to make."""
    q, scales = jnp.zeros((2, 40), jnp.int8), jnp.ones((2, 2), jnp.float16)
    build = int4_from_integers if bits == 4 else int8_from_integers
    weight = build(q, scales, 32, minima=scales)
    return dataclasses.replace(weight, zeros=jnp.zeros(weight.scales.shape, jnp.int8))


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_minima_are_refused(bits: int) -> None:
    for check in (check_arrays, lambda weight: matmul(random_rows(1, 40), weight)):
        with pytest.raises(ValueError, match="a weight must have zeros or minima, got both"):
            check(both(bits))


def test_arrays_that_do_not_fit_are_refused() -> None:
    weight = random_int4(6, 300, 32, minima=True)
    check_arrays(weight)
    with pytest.raises(
        ValueError, match=r"minima must be bfloat16\[6, 16\], got bfloat16\[6, 15\]"
    ):
        check_arrays(dataclasses.replace(weight, minima=weight.minima[:, 1:]))
    with pytest.raises(ValueError, match=r"minima must be bfloat16\[6, 16\], got float32\[6, 16\]"):
        check_arrays(dataclasses.replace(weight, minima=weight.minima.astype(jnp.float32)))
    outliers = with_outliers(6, 300).outliers
    with pytest.raises(ValueError, match="a weight with outliers must have no minima, got both"):
        check_arrays(dataclasses.replace(weight, outliers=outliers))


def test_hopper_s_kernel_leaves_them_to_the_other_gpus() -> None:
    weight = random_int4(64, 300, 32, minima=True)
    assert not mosaic_gpu.supports(weight)
    with pytest.raises(ValueError, match=r"mosaic_gpu serves .* without minima"):
        mosaic_gpu.matmul(random_rows(1, 300), weight)
