"""The Triton kernel agrees with the reference in every quantized format.

`tests/kernels/test_pallas_kernels.py` has the tests that the TPU kernel shares.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference, triton_gpu
from tests.kernels.test_mosaic_gpu import lowered, random_rows, random_weight
from tests.support.compiled import dequantize

FORMATS = (
    "int4 128 zeros", "int4 32 zeros", "int4 None zeros", "int4 32 minima", "int4 None minima",
    "mxfp4", "int8 64", "int8 None", "int8 32 minima",
)  # fmt: skip


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.covering(1)
def test_the_meaning_is_the_reference(name: str, activation: str) -> None:
    # |kernel − reference| ≤ 2^-20 · Σ_k |x[m, k] · w[n, k]|, where w includes its zero. One
    # misplaced nibble, scale or zero costs at least 2^-10.
    x, weight = random_rows(17, 300), random_weight(name, 72, 300)
    y = jax.jit(lambda x, w: triton_gpu.matmul(x, w, activation, interpret=True))(x, weight)
    sizes = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(dequantize(weight))).T
    # The reference would split a bfloat16 x into integers for 8-bit weights.
    expected = reference.matmul(x.astype(jnp.float32), weight, activation)
    error = np.abs(np.asarray(y) - np.asarray(expected))
    assert np.all(error <= sizes * 2.0**-20)


@pytest.mark.parametrize("name", FORMATS)
def test_it_lowers(name: str) -> None:
    x, weight = random_rows(17, 512), random_weight(name, 96, 512)
    for activation in ("a16", "a8"):
        text = lowered(lambda x, w, a=activation: triton_gpu.matmul(x, w, a), x, weight)
        assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


def test_wrong_zeros_are_refused() -> None:
    x, weight = random_rows(3, 256), random_weight("int4 128 zeros", 96, 256)
    assert weight.zeros is not None
    wrong = dataclasses.replace(weight, zeros=jnp.zeros((96, 1), jnp.int8))
    with pytest.raises(ValueError, match=r"zeros must be int8\[96, 2\], got int8\[96, 1\]"):
        triton_gpu.matmul(x, wrong)
