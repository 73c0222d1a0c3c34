"""Compares every CPU implementation of `matmul` with float64, in all formats and precisions.

Accelerator kernels are tested in separate files.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu, reference
from pallas_kernels.activations import split_activations
from pallas_kernels.cpu.native import instruction_sets
from pallas_kernels.formats import (
    PLANE,
    Bfloat16Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    Quantized,
    int4_from_integers,
    int8_from_integers,
    mxfp4_from_codes,
    padded_inputs,
    zero_points,
)
from pallas_kernels.interleave import interleave
from pallas_kernels.matmul import matmul
from pallas_kernels.nested import NestedInt8Weight
from pallas_kernels.weights import Rounded, Weight
from tests.support.compiled import dequantize, quantize_activations
from tests.support.covering import representatives
from tests.support.random_weights import FORMATS, SOME, random_int4, random_rows, random_weight

Implementation = Callable[..., list[list[jax.Array]]]
split = jax.jit(split_activations, static_argnums=1)

MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by code


def _program(multiply: Callable[..., jax.Array]) -> Implementation:
    """One program for all rows and activations, because compiling takes most of the time."""

    def run(
        rows: list[jax.Array], weight: Weight, activations: tuple[str, ...]
    ) -> list[list[jax.Array]]:
        return [[multiply(x, weight, each) for each in activations] for x in rows]

    return jax.jit(run, static_argnums=2)


def _on(instruction_set: str) -> Implementation:
    return _program(
        lambda x, weight, activation: cpu.matmul(
            x, (weight,), activation=activation, instruction_set=instruction_set
        )[0]
    )


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": _program(reference.matmul),
    **{name: _on(name) for name in instruction_sets()},
}
FUSED = [name for name in instruction_sets() if name != "portable"]  # they round a · b + c once
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
formats = pytest.mark.parametrize("name", FORMATS)
FLOATS = "reference", "avx512_bf16"  # in which codes of 4 bits meet bfloat16 as floats
INTEGERS = [name for name in FUSED if name not in FLOATS]
ROWS = [random_rows(m, 300) for m in (1, 9, 40)]
some_formats = pytest.mark.parametrize("name", representatives(FORMATS, *SOME))


def run(implementation: str, x: jax.Array, weight: Weight, activation: str) -> np.ndarray:
    """Multiplies: f64[M, N]."""
    return runs(implementation, [x], weight, (activation,))[0][0]


def runs(
    implementation: str, rows: list[jax.Array], weight: Weight, activations: tuple[str, ...]
) -> list[list[np.ndarray]]:
    """Multiplies each of the rows' arrays at each precision: f64[M, N].

    The reference's arithmetic is XLA's own, so every number of rows has its own program. Weights
    with outliers go through `matmul`, which splits them.
    """
    if isinstance(weight, Int4Weight) and weight.outliers is not None:
        y = [[matmul(x, weight, each) for each in activations] for x in rows]
    elif implementation == "reference":
        call = IMPLEMENTATIONS[implementation]
        y = [call([x], weight, activations)[0] for x in rows]
    else:
        y = IMPLEMENTATIONS[implementation](rows, weight, activations)
    return [[np.asarray(each, np.float64) for each in of_x] for of_x in y]


def same(found: object, expected: object) -> None:
    """The same bits in every array."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def activations_of(weight: Weight) -> tuple[str, ...]:
    return ("a16", "a8", "a4") if isinstance(weight, Quantized) else ("a16",)


def reads_integers(implementation: str, weight: Weight, x: jax.Array | np.ndarray) -> bool:
    """Whether "a16" reads x as integers of 16 bits."""
    if x.dtype != jnp.bfloat16 or not isinstance(weight, Rounded):
        return False
    if isinstance(weight, Int8Weight | NestedInt8Weight):
        return True
    return implementation not in FLOATS


def represented(
    x: jax.Array | np.ndarray, weight: Weight, activation: str, implementation: str = "reference"
) -> np.ndarray:
    """The values of the activations as they are multiplied: f64[M, K]."""
    m, k = x.shape
    if isinstance(weight, Int4Weight) and weight.outliers is not None:
        columns = weight.outliers.columns
        inner, others = dataclasses.replace(weight, outliers=None), np.array(x)
        others[:, columns] = 0
        implementation = next(iter(instruction_sets()), "reference")  # which `matmul` chooses
        values = represented(others, inner, activation, implementation)
        precision = "a16" if activation == "a16" else "a8"
        values[:, columns] = represented(
            np.asarray(x)[:, columns], weight.outliers.weight, precision
        )
        return values
    if activation == "a16" and not reads_integers(implementation, weight, x):
        return np.asarray(x, np.float64)
    padded = np.pad(np.asarray(x, np.float32), ((0, 0), (0, padded_inputs(k) - k)))
    if activation == "a16":
        high, low, scales = split(padded, weight.group_size or PLANE)
        q = 256.0 * np.asarray(high) + np.asarray(low)
    else:
        q, scales = quantize_activations(padded, activation, weight.group_size)
    groups = np.asarray(q, np.float64).reshape(m, scales.shape[1], -1)
    return (groups * np.asarray(scales, np.float64)[:, :, None]).reshape(m, -1)[:, :k]


def extreme_codes(group_size: int, points: str) -> Weight:
    """A weight (70, 300) of 4 bits. The first output has the smallest codes, the second the
    largest, and zeros at the other end. In the next twenty both occur beside their neighbours."""
    rng, shape = np.random.default_rng(group_size), (70, -(-300 // group_size))
    if points == "mxfp4":
        codes = rng.integers(0, 16, (70, 300), dtype=np.uint8)
        codes[:2] = np.array([[15], [7]])
        exponents = rng.integers(110, 140, (70, 10), dtype=np.uint8)
        return mxfp4_from_codes(jnp.asarray(codes), jnp.asarray(exponents))
    q = rng.integers(-8, 8, (70, 300))
    q[:2] = np.array([[-8], [7]])
    q[2:12] = rng.integers(-8, -6, (10, 300))
    q[12:22] = rng.integers(6, 8, (10, 300))
    scales = jnp.asarray(rng.uniform(0.01, 1, shape), jnp.float16)
    zeros = (
        jnp.asarray(rng.integers(-8, 8, shape), jnp.int8)
        .at[:2]
        .set(jnp.array([[7], [-8]], jnp.int8))
    )
    return int4_from_integers(
        jnp.asarray(q, jnp.int8), scales, group_size,
        zeros=zeros if points == "zeros" else None,
        minima=-2 * scales if points == "minima" else None,
    )  # fmt: skip


def check(implementation: str, x: jax.Array, weight: Weight, *activations: str) -> None:
    # |y − exact| ≤ 2^-19 · Σ_k |x[m, k]| · |w[n, k]|, 32 float32 roundings. With zeros or minima,
    # which are added at the end, |w[n, k]| grows by all levels · scale. One misplaced nibble or
    # scale costs at least 2^-10.
    w = np.asarray(dequantize(weight), np.float64)
    magnitude = np.abs(w)
    if isinstance(weight, Int4Weight | Int8Weight) and zero_points(weight) is not None:
        magnitude = magnitude - 2 * weight.smallest * float(weight.scales.max())
    (found,) = runs(implementation, [x], weight, activations)
    for activation, y in zip(activations, found, strict=True):
        values = represented(x, weight, activation, implementation)
        bound = np.abs(values) @ magnitude.T * 2.0**-19 + 1e-30
        assert y.shape == (x.shape[0], w.shape[0])
        assert np.all(np.abs(y - values @ w.T) <= bound)


@implementations
@formats
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covering(1)
def test_the_meaning(implementation: str, name: str, dtype: str) -> None:
    for m, n, k in ((1, 70, 300), (9, 65, 512)):
        weight = random_weight(name, n, k)
        check(implementation, random_rows(m, k, dtype), weight, *activations_of(weight))


@implementations
def test_every_number_of_rows(implementation: str) -> None:
    x, weight = random_rows(33, 300), random_int4(67, 300)
    check(implementation, x, weight, "a8")
    numbers = (1, 2, 5, 8, 16, 32) if implementation == "reference" else range(1, 33)
    (y,), *others = runs(implementation, [x, *(x[:m] for m in numbers)], weight, ("a8",))
    for (some,) in others:
        np.testing.assert_array_equal(some, y[: len(some)])


@implementations
@some_formats
@pytest.mark.covering(1)
def test_a_row_does_not_depend_on_the_others(implementation: str, name: str) -> None:
    # A row has the same bits for M = 1 … 100 and at any position.
    weight, x = random_weight(name, 70, 300), random_rows(100, 300)
    order = np.random.default_rng(0).permutation(100)
    rows = [x, *(x[:m] for m in (1, 4, 5, 17)), x[order]]
    whole, *parts, moved = runs(implementation, rows, weight, activations_of(weight)[:2])
    for number, y in enumerate(whole):
        for part in parts:
            np.testing.assert_array_equal(part[number], y[: len(part[number])])
        np.testing.assert_array_equal(moved[number], y[order])


@implementations
def test_8_bit_weights_read_bfloat16_as_integers_of_16_bits(implementation: str) -> None:
    # Multiplied by one, every input comes out as it was represented. In a row, magnitudes differ by
    # a factor of 2^30, and some groups have nothing, tiny values or the largest bfloat16 below a
    # power of two.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 300)) * 2.0 ** rng.integers(-15, 15, (40, 300))
    x[1, :32], x[2, :32], x[3, :32] = 0, 1e-39, 255 / 256
    x = jnp.asarray(x, jnp.bfloat16)
    for group_size in (32, 64, None):
        ones = jnp.ones((300, 1 if group_size is None else -(-300 // group_size)))
        weight = int8_from_integers(jnp.eye(300, dtype=jnp.int8), ones, group_size)
        values, exact = represented(x, weight, "a16"), np.asarray(x, np.float64)
        for (y,) in runs(implementation, [x[:1], x[:3], x], weight, ("a16",)):
            np.testing.assert_array_equal(y, values[: len(y)])
        first, errors = np.abs(exact)[:, :32], np.abs(values - exact)[:, :32]
        largest = np.abs(exact)[:, : group_size or PLANE].max(axis=1, keepdims=True)
        assert not errors[(first >= largest / 64) & (largest > 1e-33)].any()
        assert np.all(errors <= largest * 2.0**-15 + 2e-39)


@implementations
@some_formats
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covering(1)
def test_what_is_not_finite_stays_in_its_row(implementation: str, name: str, dtype: str) -> None:
    weight = random_weight(name, 40, 300)
    clean = np.array(random_rows(5, 300, dtype))
    clean[1] = 0
    dirty = clean.copy()
    dirty[2, 7], dirty[3, 200], dirty[4, 8] = np.nan, np.inf, -np.inf
    found, expected = runs(implementation, [dirty, clean], weight, activations_of(weight))
    for y, without in zip(found, expected, strict=True):
        assert not y[1].any() and np.isnan(y[2]).all() and not np.isfinite(y[3:]).any()
        np.testing.assert_array_equal(y[:2], without[:2])


@implementations
@pytest.mark.parametrize("activation", ["a16", "a8", "a4"])
def test_scales_of_zero_and_below_the_normal_range(implementation: str, activation: str) -> None:
    q = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (16, 256)), jnp.int8)
    scales = jnp.full((16, 2), 0.01, jnp.float32).at[0].set(0).at[1].set(1e-40).at[2].set(1e-37)
    weight = int4_from_integers(q, scales)
    x = random_rows(3, 256, "float32")
    y = run(implementation, x, weight, activation)
    assert not y[:, 0].any() and np.all(np.abs(y[:, 1]) < 1e-35)  # whether flushed to zero or not
    check(implementation, x, weight, activation)


@implementations
def test_subnormal_float16_scales_and_minima(implementation: str) -> None:
    # The values are normal in float32, so no thread flushes them to zero.
    q = jnp.asarray(np.random.default_rng(0).integers(-128, 128, (16, 256)), jnp.int8)
    scales = jnp.full((16, 8), 3e-5, jnp.float16).at[0].set(2.0**-24)
    for minima in (None, -scales):
        weight = int8_from_integers(q, scales, 32, minima=minima)
        y = run(implementation, jnp.eye(256)[:4], weight, "a16")
        factors, least = np.asarray(scales, np.float64)[:, :1], 0 if minima is None else 127
        np.testing.assert_array_equal(y.T, factors * (np.asarray(q, np.int64)[:, :4] + least))


@implementations
def test_activations_below_the_normal_range(implementation: str) -> None:
    x = jnp.full((2, 256), 1e-39, jnp.float32).at[1].set(1e-30)
    y = run(implementation, x, random_int4(16, 256), "a8")
    assert not y[0].any() and np.isfinite(y).all() and y[1].any()


@implementations
def test_every_mxfp4_value_and_the_largest_scale_differences(implementation: str) -> None:
    # w = ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} · 2^(e - 127).
    values = MXFP4_VALUES
    codes = jnp.asarray(np.tile(np.arange(16, dtype=np.uint8), (3, 2)))  # [3, 32]
    weight = mxfp4_from_codes(codes, jnp.array([[127], [100], [200]], jnp.uint8))
    exact = np.tile(values, 2)[:, None] * 2.0 ** np.array([0, -27, 73])
    np.testing.assert_array_equal(dequantize(weight), exact.T)
    np.testing.assert_array_equal(run(implementation, jnp.eye(32), weight, "a16"), exact)
    broken = Mxfp4Weight(weight.packed, weight.scales.at[1, 0].set(255), 32)
    y = run(implementation, jnp.ones((2, 32)), broken, "a16")
    assert np.isnan(y[:, 1]).all() and np.isfinite(y[:, [0, 2]]).all()


@implementations
@pytest.mark.parametrize(
    ("least", "beyond", "factor"), [(2, (2, 0, 1), 2.0**80), (245, (252, 253, 254), 2.0**-80)]
)
def test_mxfp4_scales_at_the_ends_of_bfloat16(
    implementation: str, least: int, beyond: tuple[int, ...], factor: float
) -> None:
    # 0.5 · 2^(2 - 127) is the smallest normal bfloat16, and 6 · 2^(252 - 127) has the largest
    # exponent. One group has a larger scale; its weights, up to 1, are finite in float32. Weights
    # below the normal range may be flushed to zero.
    rng = np.random.default_rng(least)
    codes = rng.integers(0, 16, (70, 512), dtype=np.uint8)
    codes[0, 160:192] %= 3
    scales = rng.integers(least, least + 8, (70, 16), dtype=np.uint8)
    for scales[0, 5] in beyond:
        weight = mxfp4_from_codes(jnp.asarray(codes), jnp.asarray(scales))
        w = MXFP4_VALUES[codes] * 2.0 ** (np.repeat(scales, 32, axis=1).astype(int) - 127)
        rows = [random_rows(m, 512) * jnp.bfloat16(factor) for m in (1, 9, 40)]
        for x, (y,) in zip(rows, runs(implementation, rows, weight, ("a16",)), strict=True):
            values = represented(x, weight, "a16", implementation)
            magnitude = np.abs(values)
            flushed = magnitude[:, 160:192].sum(axis=1, keepdims=True) * 2.0**-126
            error = np.abs(y - values @ w.T)
            assert np.all(error <= magnitude @ np.abs(w).T * 2.0**-19 + flushed)


@pytest.mark.skipif(not cpu.available(), reason="the package was installed without a C++ compiler")
class TestCpu:
    """Tests of the C++ library alone."""

    @pytest.mark.parametrize("instruction_set", FUSED[:-1])
    def test_instruction_sets_agree_on_integers(self, instruction_set: str) -> None:
        # Integer sums are exact, and the float operations have the same order.
        x = random_rows(9, 300)
        for name in ("int4-32-zeros", "int4-32-minima", "int4-128", "mxfp4", "int8-32-minima"):
            weight = random_weight(name, 70, 300)
            expected = run(FUSED[-1], x, weight, "a8")
            np.testing.assert_array_equal(run(instruction_set, x, weight, "a8"), expected)

    @pytest.mark.parametrize("instruction_set", FUSED[:-1])
    def test_instruction_sets_agree_on_8_bit_weights_at_any_precision(
        self, instruction_set: str
    ) -> None:
        for name in ("int8-64", "int8-32-minima", "int8-channel", "nested8-64"):
            weight = random_weight(name, 70, 300)
            for stored in (weight, interleave(weight)):
                expected = runs(FUSED[-1], ROWS, stored, ("a16",))
                same(runs(instruction_set, ROWS, stored, ("a16",)), expected)

    @pytest.mark.parametrize("instruction_set", INTEGERS[:-1])
    @pytest.mark.parametrize("group_size", [32, 64, 128])
    @pytest.mark.parametrize("points", ["none", "zeros", "minima", "mxfp4"])
    def test_codes_that_are_multiplied_as_integers_have_the_same_bits(
        self, instruction_set: str, group_size: int, points: str
    ) -> None:
        # By tiles of integers and of bfloat16, too. The first outputs, the first rows and the first
        # group reach the largest sums that there are; others are as large, and odd.
        weight, rng = extreme_codes(group_size, points), np.random.default_rng(0)
        x = np.array(random_rows(70, 300) * 2.0 ** rng.integers(-12, 12, (70, 300)))
        x[:2, :group_size] = 127 * 256 * np.array([[1], [-1]])
        small = 2 * rng.integers(0, 128, (20, group_size)) + 1
        x[2:22, :group_size] = np.where(rng.random(small.shape) < 0.5, 127 * 256, small)
        rows = [jnp.asarray(x[:m], jnp.bfloat16) for m in (1, 4, 17, 70)]
        for stored in (weight, interleave(weight)):
            expected = runs(INTEGERS[-1], rows, stored, ("a16",))
            same(runs(instruction_set, rows, stored, ("a16",)), expected)

    @pytest.mark.parametrize("threads", [1, 4])
    def test_the_number_of_threads_changes_nothing(self, threads: int, tmp_path: Path) -> None:
        path = tmp_path / "result.npy"
        code = (
            "import numpy as np; from pallas_kernels.matmul import matmul;"
            "from tests.support.random_weights import random_int4, random_rows;"
            f"np.save({str(path)!r}, matmul(random_rows(70, 520), random_int4(2100, 520)))"
        )
        environment = os.environ | {"NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        x, weight = random_rows(70, 520), random_int4(2100, 520)
        here = np.asarray(matmul(x, weight))
        np.testing.assert_array_equal(np.load(path), here)
        few = [matmul(x[first : first + 35], weight) for first in (0, 35)]  # in narrow shares
        np.testing.assert_array_equal(np.concatenate(few), here)

    def test_several_weights_read_one_x(self) -> None:
        # Beside one with outliers, every weight is multiplied alone.
        names = [name for name in FORMATS if name != "int4-outliers"]
        weights = tuple(random_weight(name, 40, 300) for name in names)
        quantized = tuple(w for w in weights if isinstance(w, Quantized))
        x = random_rows(6, 300)
        one_by_one = jax.jit(
            lambda weights, activation: tuple(matmul(x, each, activation) for each in weights),
            static_argnums=1,
        )
        for group, activation in ((weights, "a16"), (quantized, "a8")):
            same(matmul(x, group, activation), one_by_one(group, activation))

    def test_vmap_over_rows_and_over_weights(self) -> None:
        x, weight = random_rows(6, 300).reshape(2, 3, 300), random_int4(40, 300)
        plain = jnp.stack([matmul(rows, weight, "a8") for rows in x])
        over_x = jax.vmap(lambda x: matmul(x, weight, "a8"))(x)
        np.testing.assert_array_equal(over_x, plain)
        both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), weight)
        np.testing.assert_array_equal(jax.vmap(lambda x, w: matmul(x, w, "a8"))(x, both), plain)
        nested = jax.vmap(jax.vmap(lambda x: matmul(x[None], weight, "a8")[0]))(x)
        np.testing.assert_array_equal(nested, plain)

    def test_inputs_that_are_not_contiguous(self) -> None:
        x, weight = random_rows(300, 6).T, random_int4(40, 300)
        np.testing.assert_array_equal(matmul(x, weight), matmul(jnp.array(x, copy=True), weight))

    def test_no_rows(self) -> None:
        assert matmul(jnp.zeros((0, 300)), random_int4(40, 300), "a8").shape == (0, 40)

    @pytest.mark.parametrize(
        ("weight", "message"),
        [
            (dataclasses.replace(random_int4(40, 300), in_features=700), "does not fit"),
            (dataclasses.replace(random_int4(40, 300), group_size=16), "unknown group size 16"),
            (
                dataclasses.replace(random_int4(40, 300), group_size=32),
                r"scales must be \[40, 16\]",
            ),
            (
                dataclasses.replace(random_int4(40, 300), zeros=jnp.zeros((40, 4), jnp.int32)),
                "zeros must be int8",
            ),
            (
                dataclasses.replace(random_int4(40, 300), minima=jnp.zeros((40, 4), jnp.float16)),
                "minima must be like the scales",
            ),
            (
                dataclasses.replace(
                    random_int4(40, 300, zeros=True), minima=jnp.zeros((40, 4), jnp.bfloat16)
                ),
                "too many buffers",
            ),
            (
                dataclasses.replace(random_int4(40, 300), scales=jnp.zeros((40, 4), jnp.int32)),
                "unknown type",
            ),
            (
                Mxfp4Weight(jnp.zeros((4, 256), jnp.uint8), jnp.zeros((4, 16)), 300),
                "another format",
            ),
            (Bfloat16Weight(jnp.zeros((4, 299), jnp.uint16)), "does not fit"),
        ],
    )
    def test_the_handler_checks_what_it_is_given(self, weight: Weight, message: str) -> None:
        with pytest.raises(Exception, match=message):
            x = random_rows(2, weight.shape[1] if weight.shape[1] != 299 else 300)
            jax.block_until_ready(cpu.matmul(x, (weight,), activation="a16"))

    def test_an_unknown_instruction_set_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"instruction_set must be one of .*got 'abacus'"):
            _on("abacus")(random_rows(1, 300), random_int4(40, 300), "a8")
