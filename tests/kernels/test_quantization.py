"""The kernel of GPUs quantizes activations as `quantize_activations` does, in any layout."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.activations import quantize_activations
from pallas_kernels.formats import BLOCK
from pallas_kernels.triton_gpu.readings import Reading, read
from tests.kernels.test_mosaic_gpu import lowered

GROUPS = (32, 128, None)


def make_case(m: int, k: int) -> jax.Array:
    """Rows with a group of zeros, and with values that are halves of the grid's steps."""
    x = np.random.default_rng(k).normal(size=(m, k))
    x[0, :200], x[-1, 5:8] = 0, (4, 2, 1)
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("activation", ["a8", "a4"])
@pytest.mark.parametrize("group_size", GROUPS)
def test_the_meaning_is_the_reference(group_size: int | None, activation: str) -> None:
    x, rows = make_case(3, 1300), 5  # two programs a row, and two rows of padding
    count = BLOCK // group_size if group_size else 1
    per_block = 2 * count + 3
    own = Reading(activation, 1300, rows, group_size=group_size, per_block=per_block, sums=16)
    q, found = jax.jit(partial(read, reading=own, interpret=True))(x)
    padded = jnp.pad(x, ((0, 2), (0, -1300 % BLOCK))).astype(jnp.float32)
    expected, scales = jax.jit(quantize_activations, static_argnums=(1, 2))(
        padded, activation, group_size
    )
    np.testing.assert_array_equal(q, expected)
    blocks = np.asarray(found).reshape(-1, per_block, rows)
    np.testing.assert_array_equal(blocks[:, :count].reshape(-1, rows).T, scales)
    sums = np.asarray(expected, np.int32).reshape(rows, scales.shape[1], -1).sum(-1)
    np.testing.assert_array_equal(blocks[:, count : 2 * count].reshape(-1, rows).T, 16 * sums)
    plain = Reading(activation, 1300, 3, group_size=group_size)
    alone = jax.jit(partial(read, reading=plain, interpret=True))(x)
    np.testing.assert_array_equal(alone[0], expected[:3])
    np.testing.assert_array_equal(alone[1].T, scales[:3])


@pytest.mark.parametrize("group_size", GROUPS)
def test_it_is_one_launch(group_size: int | None) -> None:
    own = Reading("a8", 1300, 2, group_size=group_size)
    text = lowered(partial(read, reading=own), make_case(2, 1300))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
