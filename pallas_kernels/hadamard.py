"""Hadamard matrices and the fast Hadamard transform (QuaRot, section 3.1).

A Hadamard matrix of order n has entries ±1 and H · Hᵀ = n · I, so H / √n is a rotation. It mixes
every input into every output, which spreads outliers over all of them. Hadamard matrices can exist
for n = 1, 2 and multiples of 4. This module builds

    2^k                      Sylvester's: H₂ ⊗ H₂ ⊗ …
    p + 1, 2 · (p + 1)       Paley's two constructions, p prime
    4 · m                    Williamson's, for the m below that Paley's leave out

and all products of these, because H_a ⊗ H_b is a Hadamard matrix of order a · b. That covers every
multiple of 4 below 188 except 156, and the layer sizes of all supported models. For other n, such
as some numbers of heads, equal blocks are rotated, of the largest size that divides n and has a
matrix. For example, 14 heads are rotated in pairs.
"""

from __future__ import annotations

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from pallas_kernels import cpu
from pallas_kernels.platforms import by_platform
from pallas_kernels.settings import own_settings

# Per m, four symmetric sequences of ±1 with period m whose periodic autocorrelations add up to
# zero, found by computer search. Bit i is set where entries i + 1 and m - i - 1 are -1.
WILLIAMSON = {
    13: (0x18, 0x2C, 0x21, 0x2A),
    23: (0x29F, 0x2F0, 0x31A, 0x48A),
    25: (0xA6D, 0xF8A, 0x2C4, 0x8DC),
    29: (0x24B5, 0x2C3D, 0x1730, 0x2047),
    43: (0x1650FD, 0x1E450C, 0x4686B, 0x138265),
}


@partial(jax.jit, static_argnames="axis")
@own_settings()
def hadamard(x: Float32[Array, "*shape"], axis: int = -1) -> Float32[Array, "*shape"]:
    """Rotates one axis by a Hadamard matrix: y = H · x / √n, in blocks if none is known for n.

    n alone fixes the order of additions, so the result is the same in every batch and program.

    Args:
      x: f32[...].
      axis: the axis to rotate.

    Returns:
      f32[...] of x's shape, with the same norm along `axis`.

    Raises:
      ValueError: x is not float32, or has no entries along the axis.
    """
    if x.dtype != jnp.float32 or x.ndim < 1 or x.shape[axis] < 1:
        raise ValueError(
            f"x must be float32 with entries along axis {axis}, got {x.dtype.name}{list(x.shape)}"
        )
    axis %= x.ndim
    n, right = x.shape[axis], math.prod(x.shape[axis + 1 :])
    size = rotation_size(n)
    blocks = x.reshape(math.prod(x.shape[:axis]) * (n // size), size, right)
    matrices = [
        jnp.asarray(hadamard_matrix(order), jnp.float32) for order in dense_orders(size) or ()
    ]
    y: jax.Array = by_platform(
        blocks,
        *matrices,
        result=jax.ShapeDtypeStruct(blocks.shape, blocks.dtype),
        default=partial(reference, scale=size**-0.5),
        cpu=partial(cpu.hadamard if cpu.available() else reference, scale=size**-0.5),
    )
    return y.reshape(x.shape)


def reference(x: jax.Array, *matrices: jax.Array, scale: float) -> jax.Array:
    """Computes y = scale · (matrices ⊗ Sylvester's) · x in plain jnp, in a fixed order.

    Args:
      x: f32[B, n, R], rotated over its middle axis.
      *matrices: f32[m, m] of ±1 each; n is the product of all m and a power of two.
      scale: multiplies the sums.

    Returns:
      f32[B, n, R].
    """
    b, rest, right = x.shape
    y = x
    for matrix in matrices:
        order = len(matrix)
        rest //= order
        y = _multiply(matrix, y.reshape(b, order, rest * right))
        b *= order
    return (_butterflies(y.reshape(b, rest, right)) * scale).reshape(x.shape)


def _multiply(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies x: f32[L, m, R] over its middle axis by a matrix of ±1, adding input by input."""

    def add(j: jax.Array, total: jax.Array) -> jax.Array:
        column, inputs = (lax.dynamic_slice_in_dim(a, j, 1, axis=1) for a in (matrix, x))
        return total + column * inputs  # the product is exact, so fusing changes nothing

    product: jax.Array = lax.fori_loop(0, len(matrix), add, jnp.zeros_like(x))
    return product


def _butterflies(x: jax.Array) -> jax.Array:
    """Multiplies x: f32[L, 2^k, R] over its middle axis by Sylvester's matrix, in k stages."""

    # Pairs are adjacent and results go to the two halves, so all stages are alike. The stages are a
    # loop, because XLA would fuse unrolled ones and compute each sum many times.
    def stage(_: jax.Array, x: jax.Array) -> jax.Array:
        first, second = x[:, 0::2], x[:, 1::2]
        return jnp.concatenate((first + second, first - second), axis=1)

    stages = x.shape[1].bit_length() - 1
    return lax.fori_loop(0, stages, stage, x) if stages else x


@cache
def rotation_size(n: int) -> int:
    """The largest divisor of n for which this module builds a matrix, usually n itself."""
    return next(d for d in range(n, 0, -1) if n % d == 0 and dense_orders(d) is not None)


@cache
def dense_orders(n: int) -> tuple[int, ...] | None:
    """The orders of the dense factors of a matrix of order n; the rest is a power of two.

    The orders are not powers of two and have the smallest possible sum. For n = 2 the order is 2,
    because XLA would unroll a loop of one butterfly and could fuse it with an earlier product.

    Returns:
      The orders; None if no Hadamard matrix of order n is known.
    """
    if n & (n - 1) == 0:
        return (2,) if n == 2 else ()
    found = [
        (order, *rest)
        for order in range(12, n + 1, 4)
        if n % order == 0 and _is_built(order) and (rest := dense_orders(n // order)) is not None
    ]
    return min(found, key=sum, default=None)


def _is_built(n: int) -> bool:
    """Whether `hadamard_matrix` builds one of order n, a multiple of 4. False for powers of two."""
    return n & (n - 1) != 0 and (
        _is_prime(n - 1) or (n % 8 == 4 and _is_prime(n // 2 - 1)) or n // 4 in WILLIAMSON
    )


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1))


@cache
def hadamard_matrix(n: int) -> np.ndarray:
    """A Hadamard matrix that is not a product of smaller ones.

    Args:
      n: 2, or an order of Paley's or Williamson's constructions as listed above.

    Returns:
      int8[n, n] of ±1.

    Raises:
      ValueError: n is not one of these.
    """
    if n == 2:
        return np.array([[1, 1], [1, -1]], np.int8)
    if n % 4 or not _is_built(n):
        raise ValueError(f"n must be 2, or p + 1, 2 · (p + 1) or 4 · m as listed, got {n}")
    if _is_prime(n - 1):  # Paley's first: p = 3 modulo 4
        matrix: np.ndarray = np.eye(n, dtype=np.int8) + _residues(n - 1)
        return matrix
    if n % 8 == 4 and _is_prime(n // 2 - 1):  # Paley's second: p = 1 modulo 4
        residues = _residues(n // 2 - 1)
        pairs = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
        matrix = np.kron(residues, pairs[0]) + np.kron(np.eye(n // 2), pairs[1])
        return matrix.astype(np.int8)
    a, b, c, d = (_symmetric_circulant(n // 4, bits) for bits in WILLIAMSON[n // 4])
    return np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])


def _residues(p: int) -> np.ndarray:
    """Jacobsthal's matrix with a border: int8[p + 1, p + 1].

    Entry (i, j) is 1, 0 or -1 as i - j is a square, zero or neither modulo p. C · Cᵀ = p · I, and C
    is symmetric where p = 1 modulo 4, else skew.
    """
    character = np.full(p, -1, np.int8)
    character[np.arange(p) ** 2 % p] = 1
    character[0] = 0
    index = np.arange(p)
    bordered = np.ones((p + 1, p + 1), np.int8)
    bordered[0, 0] = 0
    bordered[1:, 0] = 1 if p % 4 == 1 else -1
    bordered[1:, 1:] = character[index[:, None] - index]
    return bordered


def _symmetric_circulant(m: int, bits: int) -> np.ndarray:
    """The circulant int8[m, m] whose first row `bits` describes (see WILLIAMSON)."""
    row = np.ones(m, np.int8)
    for i in range(m // 2):
        if bits >> i & 1:
            row[[i + 1, m - i - 1]] = -1
    index = np.arange(m)
    circulant: np.ndarray = row[index[:, None] - index]
    return circulant
