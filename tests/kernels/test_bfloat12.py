"""bfloat16 in 12 bits gives back every bit, and products of the same bits as the plain matrix."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu, reference
from pallas_kernels.bfloat12 import (
    MOST_ESCAPES,
    NO_ESCAPE,
    Bfloat12Weight,
    bfloat12,
    with_room,
)
from pallas_kernels.cpu.native import instruction_sets
from pallas_kernels.formats import Bfloat16Weight
from pallas_kernels.interleave import by_rows, interleave
from pallas_kernels.matmul import matmul
from pallas_kernels.stacks import Stacked
from pallas_kernels.weight_checks import check_arrays
from pallas_kernels.weights import Weight
from tests.support.compiled import dequantize, plain_values, take_rows
from tests.support.covering import representatives
from tests.support.random_weights import random_bits, random_rows

SIZES = representatives(
    [(1, 1), (5, 7), (16, 256), (37, 300), (70, 1030), (128, 2048)], (1, 1), (37, 300), (70, 1030)
)


def encoded(bits: np.ndarray) -> Bfloat12Weight:
    weight, _ = bfloat12(bits, most_escapes=1)
    assert weight is not None
    check_arrays(weight)
    assert weight.shape == bits.shape
    return weight


def bits_of(weight: Weight) -> np.ndarray:
    assert isinstance(weight, Bfloat12Weight)
    return np.asarray(plain_values(weight)).view(np.uint16)


def test_every_pattern_comes_back() -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    alike = patterns.reshape(256, 256)  # a row has one high byte, a tile sixteen
    assert not np.any(np.asarray(encoded(alike).escapes) != NO_ESCAPE)
    mixed = np.random.default_rng(0).permutation(patterns).reshape(64, 1024)
    for bits in (alike, alike.T, mixed):
        np.testing.assert_array_equal(bits_of(encoded(np.ascontiguousarray(bits))), bits)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("escapes", [0, 0.003, 0.3])
@pytest.mark.covering(1)
def test_every_size_comes_back(n: int, k: int, escapes: float) -> None:
    bits = random_bits(n, k, escapes)
    weight = encoded(bits)
    np.testing.assert_array_equal(bits_of(weight), bits)
    wanted = jnp.asarray([[0, n - 1], [n // 2, 0]])
    rows = np.asarray(take_rows(weight, wanted)).view(np.uint16)
    np.testing.assert_array_equal(rows, bits[np.asarray(wanted)])
    assert interleave(weight) is weight and by_rows(weight) is weight


def test_parts_that_are_encoded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.bfloat12._SHARE", 2 * 16 * 300)  # two tiles at a time
    parts = random_bits(32, 300, 0), random_bits(32, 300, 0.3), random_bits(21, 300, 0.003)
    bits = np.concatenate(parts)
    weight = encoded(bits)
    np.testing.assert_array_equal(bits_of(weight), bits)
    held = np.count_nonzero(np.asarray(weight.escapes) != NO_ESCAPE, axis=1)
    assert held[:2].max() < held[2:4].min()  # their lists have different lengths


def test_its_bytes() -> None:
    bits = random_bits(512, 1024, 0)
    assert encoded(bits).nbytes < 12.15 / 16 * bits.nbytes


def test_too_many_escapes() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, (64, 512), dtype=np.uint16)
    weight, count = bfloat12(bits)
    assert weight is None and count > MOST_ESCAPES * bits.size
    assert 0.85 < count / bits.size < 0.94  # a palette holds the most frequent 16 of 256
    weight, count = bfloat12(np.zeros((16, 8), np.uint16))
    assert weight is not None and count == 0


def test_palettes_hold_the_most_frequent_high_bytes() -> None:
    bits = np.zeros((16, 512), np.uint16)
    bits[:, 256:] = (np.arange(16) * 256)[:, None]
    bits[3, 300] = 0xABCD
    weight = encoded(bits)
    assert sorted(np.asarray(weight.palettes)[0, 1].tolist()) == list(range(16))
    assert np.asarray(weight.escapes).tolist() == [[300 << 12 | 3 << 8 | 0xAB]]


@pytest.mark.recompiled
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.covering(1)
def test_products_have_the_bits_of_the_plain_matrix(instruction_set: str, n: int, k: int) -> None:
    for escapes in (0, 0.0003, 0.02):
        bits = random_bits(n, k, escapes)
        weights = encoded(bits), interleave(Bfloat16Weight(jnp.asarray(bits)))
        numbers = (1, 2, 3, 7, 12, 13, 24, 25, 33, 64)
        rows = [random_rows(m, k, dtype) for dtype in ("bfloat16", "float32") for m in numbers]
        for one, other in _products(rows, weights, instruction_set):
            np.testing.assert_array_equal(
                np.asarray(one).view(np.uint32), np.asarray(other).view(np.uint32)
            )


@partial(jax.jit, static_argnums=2)
def _products(
    rows: list[jax.Array], weights: tuple[Weight, ...], instruction_set: str
) -> list[list[jax.Array]]:
    """One program for all numbers of rows, because compiling takes most of the time."""
    return [
        [cpu.matmul(x, (w,), instruction_set=instruction_set)[0] for w in weights] for x in rows
    ]


@pytest.mark.recompiled
def test_the_reference_has_the_bits_of_the_plain_matrix() -> None:
    bits = random_bits(300, 520)
    for m in (1, 9):
        x = random_rows(m, 520)
        np.testing.assert_array_equal(
            reference.matmul(x, encoded(bits)),
            reference.matmul(x, Bfloat16Weight(jnp.asarray(bits))),
        )


def test_values_that_are_not_finite() -> None:
    bits = random_bits(40, 300).copy()
    bits[3, 7], bits[20, 299], bits[33, 0] = 0x7F80, 0xFF80, 0x7FC1  # infinities and a NaN
    y = np.asarray(matmul(jnp.ones((3, 300), jnp.bfloat16), encoded(bits)))
    assert np.all(y[:, 3] == np.inf) and np.all(y[:, 20] == -np.inf) and np.isnan(y[:, 33]).all()
    assert np.isfinite(np.delete(y, (3, 20, 33), axis=1)).all()


@pytest.mark.recompiled
def test_a_stack_whose_matrices_differ_in_escapes() -> None:
    both = [encoded(random_bits(70, 300, escapes)) for escapes in (0, 0.02)]
    wide = [with_room(weight, max(each.escapes.shape[1] for each in both)) for weight in both]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *wide)
    x = random_rows(3, 300)
    for index, weight in enumerate(both):
        y = matmul(x, Stacked(stack, jnp.int32(index)))
        np.testing.assert_array_equal(y, matmul(x, weight))
        np.testing.assert_array_equal(bits_of(wide[index]), bits_of(weight))


def test_under_vmap_and_with_other_weights() -> None:
    bits = random_bits(40, 300)
    weight, plain = encoded(bits), Bfloat16Weight(jnp.asarray(bits))
    x = random_rows(6, 300)
    one, other = matmul(x, (weight, plain))
    np.testing.assert_array_equal(one, other)
    stacked = jax.vmap(lambda rows: matmul(rows, weight))(x.reshape(2, 3, 300))
    np.testing.assert_array_equal(stacked.reshape(6, 40), one)
    np.testing.assert_array_equal(dequantize(weight), dequantize(plain))


@pytest.mark.skipif(not cpu.available(), reason="the package was installed without a C++ compiler")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 400}, "does not fit"),
        ({"palettes": jnp.zeros((3, 1, 16), jnp.uint8)}, "palettes do not fit"),
        ({"escapes": jnp.zeros((2, 1), jnp.uint32)}, "escapes do not fit"),
        ({"escapes": jnp.zeros((3, 1), jnp.int32)}, "escapes do not fit"),
    ],
)
def test_the_handler_checks_what_it_is_given(changes: dict[str, object], message: str) -> None:
    weight = dataclasses.replace(encoded(random_bits(40, 300)), **changes)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(cpu.matmul(random_rows(2, weight.shape[1]), (weight,)))
    with pytest.raises(ValueError, match="must be"):
        check_arrays(weight)


def test_hostile_escapes_stay_inside() -> None:
    # A file may hold any numbers: in no order, and of inputs that there are not.
    weight = encoded(random_bits(40, 300))
    rng = np.random.default_rng(0)
    for _ in range(20):
        escapes = rng.integers(0, 2**32, (3, 9), dtype=np.uint32)
        escapes[:, ::2] %= 2**21
        hostile = dataclasses.replace(weight, escapes=jnp.asarray(escapes))
        for m in (1, 8, 40):
            jax.block_until_ready(matmul(random_rows(m, 300), hostile))
        jax.block_until_ready(plain_values(hostile))
