"""The Triton kernel agrees with the reference in every quantized format.

`tests/kernels/test_pallas_kernels.py` has the tests that the TPU kernel shares.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference, triton_gpu
from pallas_kernels.bfloat12 import bfloat12
from pallas_kernels.formats import Bfloat16Weight, int4_from_integers
from pallas_kernels.matmul import matmul
from pallas_kernels.nested import NestedInt8Weight, NestedWeight
from pallas_kernels.planes import LARGEST, SMALLEST, joined, nested_int8_from_integers
from pallas_kernels.stacks import Stacked
from pallas_kernels.triton_gpu import bfloat16_matmul, quantized_matmul, segments
from pallas_kernels.triton_gpu.segments import steps_per_segment
from tests.kernels.test_mosaic_gpu import lowered, random_rows, random_weight, stack_of
from tests.support.compiled import dequantize
from tests.support.random_weights import random_bfloat12, random_bits

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
        launches = 1 if activation == "a16" else 2  # one quantizes x
        assert text.count("custom_call @__gpu$xla.gpu.triton") == launches


def test_wrong_zeros_are_refused() -> None:
    x, weight = random_rows(3, 256), random_weight("int4 128 zeros", 96, 256)
    assert weight.zeros is not None
    wrong = dataclasses.replace(weight, zeros=jnp.zeros((96, 1), jnp.int8))
    with pytest.raises(ValueError, match=r"zeros must be int8\[96, 2\], got int8\[96, 1\]"):
        triton_gpu.matmul(x, wrong)


def test_every_zero_is_subtracted_exactly() -> None:
    """136 and a zero are subtracted one by one: 136 + 121 is not a bfloat16."""
    q = np.random.default_rng(0).integers(-8, 8, (64, 128))
    zeros, scales = jnp.arange(64, 128, dtype=jnp.int8)[:, None], jnp.ones((64, 1), jnp.bfloat16)
    weight = int4_from_integers(jnp.asarray(q, jnp.int8), scales, 128, zeros)
    x = jnp.eye(128, dtype=jnp.bfloat16)[:16]
    y = triton_gpu.matmul(x, weight, interpret=True)
    np.testing.assert_array_equal(y.T, q[:, :16] - np.arange(64, 128)[:, None])


def random_bfloat16(n: int, k: int) -> Bfloat16Weight:
    values = jnp.asarray(np.random.default_rng(n + k).normal(size=(n, k)), jnp.bfloat16)
    return Bfloat16Weight(jax.lax.bitcast_convert_type(values, jnp.uint16))


@pytest.mark.parametrize(("n", "k"), [(96, 300), (64, 1536), (20, 64)])
def test_bfloat16_products_and_their_rows(n: int, k: int) -> None:
    # The second matrix has three segments: added by XLA for few rows, by the kernel for many.
    # |kernel − exact| ≤ 2^-20 · Σ_k |x[m, k] · w[n, k]|; a misplaced input costs 2^-8 or more.
    x, weight = random_rows(130, k), random_bfloat16(n, k)
    call = jax.jit(lambda x: triton_gpu.matmul(x, weight, interpret=True))
    y, wide = np.asarray(call(x)), np.asarray(x, np.float64)
    w = np.asarray(dequantize(weight), np.float64)
    assert y.shape == (130, n)
    assert np.all(np.abs(y - wide @ w.T) <= np.abs(wide) @ np.abs(w).T * 2.0**-20)


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "activation"),
    [("bfloat16", "a16"), ("int4 64 zeros", "a16"), ("int4 64 zeros", "a8"), ("mxfp4", "a8")],
)
def test_many_rows_add_the_same_segments(
    name: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel with whole sums, and with one segment per program, of tiles of one height and two.
    x, n = random_rows(33, 1024), 80
    weight: Any = random_bfloat16(n, 1024) if name == "bfloat16" else random_weight(name, n, 1024)
    assert steps_per_segment(n, 8, bfloat16_matmul.SHORTEST) == 4
    assert steps_per_segment(n, 4, quantized_matmul.SHORTEST) == 2

    def product(x: jax.Array) -> np.ndarray:
        call = partial(triton_gpu.matmul, activation=activation, interpret=True)
        return np.asarray(jax.jit(call)(x, weight))

    apart, alone = product(x), product(x[:1])
    monkeypatch.setattr(segments, "PROGRAMS", 0)
    monkeypatch.setattr(bfloat16_matmul, "steps_per_segment", lambda *_: 4)
    monkeypatch.setattr(quantized_matmul, "steps_per_segment", lambda *_: 2)
    np.testing.assert_array_equal(product(x), apart)
    np.testing.assert_array_equal(apart[:1], alone)


@pytest.mark.covering(1)
@pytest.mark.parametrize("m", [3, 130])
@pytest.mark.parametrize(
    ("n", "k", "escapes"), [(96, 300, 0.003), (64, 1536, 0.02), (20, 68, 0.1), (8, 256, 0)]
)
def test_12_bits_have_the_bits_of_16(n: int, k: int, escapes: float, m: int) -> None:
    # Whole and partial tiles, segments that begin behind escapes, one list that is full.
    bits, x = random_bits(n, k, escapes), random_rows(m, k)
    weight, count = bfloat12(bits, most_escapes=1)
    assert weight is not None and (count > 0) == (escapes > 0)
    call = jax.jit(partial(triton_gpu.matmul, interpret=True))
    np.testing.assert_array_equal(call(x, weight), call(x, Bfloat16Weight(jnp.asarray(bits))))


@pytest.mark.parametrize("group_size", [64, None])
def test_planes_of_8_bits_have_the_bits_of_8_bits(group_size: int | None) -> None:
    weight, x = random_nested8(72, 300, group_size), random_rows(17, 300)
    call = jax.jit(partial(triton_gpu.matmul, interpret=True))
    np.testing.assert_array_equal(call(x, weight), call(x, joined(weight)))
    with pytest.raises(ValueError, match=r"weight must be one of .* got NestedInt8Weight"):
        triton_gpu.matmul(x, weight, "a8")


def random_nested8(n: int, k: int, group_size: int | None) -> NestedInt8Weight:
    rng = np.random.default_rng(n + k)
    q = jnp.asarray(rng.integers(SMALLEST, LARGEST + 1, (n, k)), jnp.int8)
    scales = rng.uniform(0.005, 0.04, (n, 1 if group_size is None else -(-k // group_size)))
    return nested_int8_from_integers(q, jnp.asarray(scales, jnp.float32), group_size)


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("name", ["nested16", "nested8"])
def test_nested_weights_lower_behind_the_door(name: str, activation: str) -> None:
    # The draft plane of 4 bits is Hopper's own kernel's.
    weight: Any = random_nested8(128, 512, 64)
    if name == "nested16":
        weight = NestedWeight(random_bfloat12(128, 512), random_weight("int4 64", 128, 512))
    text = lowered(partial(matmul, activation=activation), random_rows(3, 512), weight)
    kernels = re.findall(r"custom_call @(?:__gpu\$xla.gpu.)?(\w+?)(?:_v2)?\(", text)
    assert sorted(kernels) == (["triton"] if activation == "a16" else ["mosaic_gpu", "triton"])


@pytest.mark.parametrize("bits", [16, 12])
def test_bfloat16_lowers_behind_the_door(bits: int) -> None:
    # A GPU multiplies bfloat16 x by its own kernel, and float32 x by the reference.
    weight = random_bfloat16(96, 512) if bits == 16 else random_bfloat12(96, 512)
    x = random_rows(17, 512)
    kernel = "custom_call @__gpu$xla.gpu.triton"
    assert lowered(matmul, x, weight).count(kernel) == 1
    assert lowered(matmul, x.astype(jnp.float32), weight).count(kernel) == 0
    with pytest.raises(ValueError, match="bfloat16 x"):
        triton_gpu.matmul(x.astype(jnp.float32), weight)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "name", ["int4 128 zeros", "int8 32 minima", "mxfp4", "bfloat16", "bfloat12", "nested8"]
)
def test_a_matrix_in_a_stack_has_the_bits_of_the_matrix_alone(name: str) -> None:
    own = {"bfloat16": random_bfloat16, "bfloat12": random_bfloat12}
    own["nested8"] = partial(random_nested8, group_size=64)
    weight = own.get(name, partial(random_weight, name))(72, 300)
    x, one = random_rows(17, 300), Stacked(stack_of(weight), jnp.int32(1))

    def product(weight: Any) -> np.ndarray:
        return np.asarray(jax.jit(partial(triton_gpu.matmul, interpret=True))(x, weight))

    np.testing.assert_array_equal(product(one), product(weight))
    text = lowered(matmul, x, one)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("make", [random_bfloat16, random_bfloat12])
def test_matrices_that_share_a_kernel_have_the_bits_that_they_have_alone(make: Any) -> None:
    x, weights = random_rows(17, 1536), [make(n, 1536) for n in (192, 72, 64)]
    assert lowered(matmul, x, tuple(weights)).count("custom_call @__gpu$xla.gpu.triton") == 1
    together = jax.jit(partial(triton_gpu.products, interpret=True))(x, weights)
    for y, weight in zip(together, weights, strict=True):
        alone = jax.jit(partial(triton_gpu.matmul, interpret=True))(x, weight)
        np.testing.assert_array_equal(y, alone)
