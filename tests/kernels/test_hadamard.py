"""Tests the Hadamard matrices, and the fast transform as a product with one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from pallas_kernels import cpu
from pallas_kernels.hadamard import (
    dense_orders,
    hadamard,
    hadamard_matrix,
    reference,
    rotation_size,
)

# The orders in QuaRot's code, with 312 (Paley's) instead of 156.
BUILT = (12, 20, 28, 36, 40, 52, 60, 92, 100, 108, 116, 140, 172, 312)
SIZES = (1, 2, 4, 24, 64, 76, 256, 400, 896, 1376)


@pytest.mark.parametrize("n", BUILT)
def test_matrices(n: int) -> None:
    """Entries ±1 and orthogonal rows: H · Hᵀ = n · I."""
    matrix = np.eye(1, dtype=int)
    for order in dense_orders(n):
        matrix = np.kron(matrix, hadamard_matrix(order).astype(int))
    matrix = np.kron(matrix, scipy.linalg.hadamard(n // len(matrix)))
    assert (np.abs(matrix) == 1).all()
    np.testing.assert_array_equal(matrix @ matrix.T, n * np.eye(n))


def test_every_order_below_188_but_one() -> None:
    assert [n for n in range(4, 188, 4) if dense_orders(n) is None] == [156]


@pytest.mark.parametrize("n", [3, 14, 30, 188])
def test_other_orders_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"got {n}"):
        hadamard_matrix(n)


@pytest.mark.parametrize("n", SIZES)
def test_transform_is_the_matrix(n: int) -> None:
    """The transform of the identity is dense ⊗ Sylvester / √n, a rotation."""
    expected = np.eye(1)
    for order in dense_orders(n):
        expected = np.kron(expected, hadamard_matrix(order).astype(float))
    expected = np.kron(expected, scipy.linalg.hadamard(n // len(expected))) * n**-0.5
    np.testing.assert_allclose(hadamard(jnp.eye(n)).T, expected, rtol=1e-6, atol=0)
    np.testing.assert_allclose(expected @ expected.T, np.eye(n), atol=1e-6)


@pytest.mark.parametrize(("n", "size"), [(14, 2), (6, 2), (30, 2), (7, 1), (156, 52), (624, 624)])
def test_sizes_without_a_matrix_are_rotated_in_blocks(n: int, size: int) -> None:
    assert rotation_size(n) == size
    x = np.random.default_rng(n).normal(size=(3, n)).astype(np.float32)
    blocks = jnp.asarray(x).reshape(3, -1, size)
    np.testing.assert_allclose(hadamard(jnp.asarray(x)).reshape(blocks.shape), hadamard(blocks))


@pytest.mark.parametrize("axis", [0, 1, -2, -1])
def test_any_axis(axis: int) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 24, 76)), jnp.float32)
    expected = jnp.moveaxis(hadamard(jnp.moveaxis(x, axis, -1)), -1, axis)
    np.testing.assert_array_equal(hadamard(x, axis=axis), expected)


@pytest.mark.parametrize("n", [2, 6, 12, 40, 172, 256, 1024])
def test_same_bits_for_any_rows_and_any_program(n: int) -> None:
    """The input is a product, which a compiler could fuse with the first additions."""
    rng = np.random.default_rng(n)
    a, b = (jnp.asarray(rng.normal(size=(33, n)), jnp.float32) for _ in range(2))
    product = jax.jit(jnp.multiply)(a, b)
    whole = np.asarray(hadamard(product))
    fused = jax.jit(lambda a, b: hadamard(a * b))
    for m in (1, 2, 7, 8, 9, 33):
        np.testing.assert_array_equal(hadamard(product[:m]), whole[:m])
        np.testing.assert_array_equal(fused(a[:m], b[:m]), whole[:m])


needs_library = pytest.mark.skipif(not cpu.available(), reason="the C++ library was not built")


# n: one or two dense orders, powers of two, and products of both. R: entries per step.
@needs_library
@pytest.mark.parametrize("r", [1, 3, 40])
@pytest.mark.parametrize("n", [1, 2, 12, 28, 64, 172, 400, 1536])
@pytest.mark.covering(1)
def test_the_library_adds_in_the_same_order(n: int, r: int) -> None:
    rng = np.random.default_rng([n, r])
    x = jnp.asarray(rng.normal(size=(5, n, r)), jnp.float32)
    matrices = [jnp.asarray(hadamard_matrix(order), jnp.float32) for order in dense_orders(n)]
    expected = jax.jit(reference, static_argnames="scale")(x, *matrices, scale=0.3)
    np.testing.assert_array_equal(cpu.hadamard(x, *matrices, scale=0.3), expected)


@needs_library
def test_vmap() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5, 24)), jnp.float32)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(hadamard))(x), hadamard(x))
    np.testing.assert_array_equal(jax.vmap(lambda x: hadamard(x, axis=0))(x), hadamard(x, axis=1))


@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24)])
def test_nothing_to_rotate(shape: tuple[int, ...]) -> None:
    assert hadamard(jnp.zeros(shape)).shape == shape


@needs_library
@pytest.mark.parametrize(
    ("x", "matrix", "message"),
    [
        (jnp.zeros(24), jnp.ones((12, 12)), r"x must be .*, got \[24\]"),
        (jnp.zeros((24, 1), jnp.bfloat16), jnp.ones((12, 12)), "x must be float32"),
        (jnp.zeros((24, 1)), jnp.ones((20, 20)), r"does not fit: got \[20, 20\]"),
        (jnp.zeros((24, 1)), jnp.ones((4, 12)), r"does not fit: got \[4, 12\]"),
        (jnp.zeros((24, 1)), jnp.ones((12, 12), jnp.int32), "a matrix does not fit"),
        (jnp.zeros((24, 1)), jnp.ones((4, 4)), "no power of two is left: 6"),
    ],
)
def test_the_handler_refuses(x: jax.Array, matrix: jax.Array, message: str) -> None:
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(cpu.hadamard(x, matrix, scale=1.0))
