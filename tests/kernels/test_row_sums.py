"""Sums over a row are correct and have the same bits for any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_sums import row_max, row_sum, running_sums

SIZES = (1, 2, 7, 8, 9, 100, 384, 4093)


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_right(size: int) -> None:
    x = np.random.default_rng(size).uniform(size=(2, 3, size)).astype(np.float32)
    exact = x.astype(np.float64)
    given = jnp.asarray(x)
    np.testing.assert_allclose(row_sum(given), exact.sum(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(running_sums(given), exact.cumsum(-1), rtol=2e-6)
    np.testing.assert_array_equal(row_max(given - 2), (x - 2).max(-1, keepdims=True))


@pytest.mark.optimized
@pytest.mark.parametrize("function", [row_sum, running_sums])
def test_other_rows_change_nothing(function: Callable[[jax.Array], jax.Array]) -> None:
    """Exponentials before a sum and divisions after it keep their bits too."""
    x = 3 * jax.random.normal(jax.random.key(0), (32, 4093))

    @jax.jit
    def share(x: jax.Array) -> jax.Array:
        weights = jnp.exp(x - row_max(x))
        return weights / function(weights)

    whole = share(x)
    for shape in ((1,), (2,), (3,), (9,), (1, 5), (4, 3)):
        part = x[: np.prod(shape)]
        np.testing.assert_array_equal(
            share(part.reshape(*shape, -1)).reshape(part.shape), whole[: len(part)], str(shape)
        )
