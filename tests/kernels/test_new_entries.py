"""The GPU's kernel for new cache entries gives the bits of the rotation and the writes apart."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_gpu
from pallas_kernels.new_entries import rotate_and_write
from tests.kernels.test_mosaic_gpu import lowered

LAYERS, SLOTS = 3, 128


def make_case(b: int, t: int, heads: int, kv_heads: int, e: int, cache: str) -> tuple[object, ...]:
    """Rows whose new tokens end before the cache, at its end and behind it."""
    rng = np.random.default_rng(t * e)

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    angles = rng.uniform(-10, 10, (b, t, e // 2))
    rope = tuple(jnp.asarray(part, jnp.float32) for part in (np.cos(angles), np.sin(angles)))
    cached = tuple(
        jnp.asarray(rng.integers(0, 2**15, (b, LAYERS, SLOTS, kv_heads, e)), cache)
        for _ in range(2)
    )
    lengths = jnp.asarray([5, SLOTS - t, SLOTS - 1][:b], jnp.int32)
    new = floats(b, t, heads, e), floats(b, t, kv_heads, e), floats(b, t, kv_heads, e)
    return *new, rope, cached, lengths, jnp.int32(1)


@pytest.mark.parametrize(
    ("b", "t", "heads", "kv_heads", "e"), [(3, 3, 8, 2, 32), (1, 1, 9, 3, 64), (2, 2, 4, 4, 16)]
)
def test_the_bits_are_those_of_the_parts(b: int, t: int, heads: int, kv_heads: int, e: int) -> None:
    case = make_case(b, t, heads, kv_heads, e, "uint16")
    found = jax.jit(partial(triton_gpu.rotate_and_write, interpret=True))(*case)
    expected = rotate_and_write(*case, jnp.bfloat16)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        bits = (np.asarray(each).view(np.uint16) for each in (own, other))
        np.testing.assert_array_equal(*bits)
    changed = np.asarray(expected[1][0]) != np.asarray(case[4][0])
    assert changed.any(axis=(3, 4)).sum() == b * t - max(0, b - 2) * (t - 1)


def test_rows_behind_the_new_ones_stay() -> None:
    *new, (cos, sin), cached, lengths, layer = make_case(3, 2, 4, 2, 32, "uint16")
    few = [each[:2] for each in (*new, cos, sin, lengths)]
    case = *few[:3], tuple(few[3:5]), cached, few[5], layer
    _, found = jax.jit(partial(triton_gpu.rotate_and_write, interpret=True))(*case)
    _, expected = rotate_and_write(*case, jnp.bfloat16)
    for own, other, before in zip(found, expected, cached, strict=True):
        np.testing.assert_array_equal(own, other)
        np.testing.assert_array_equal(own[2], before[2])


def test_a_gpu_takes_one_kernel_and_copies_no_cache() -> None:
    case = make_case(2, 3, 8, 2, 32, "uint16")
    text = lowered(partial(rotate_and_write, dtype=jnp.bfloat16), *case)
    [call] = [line for line in text.splitlines() if "custom_call @__gpu$xla.gpu.triton" in line]
    assert call.count("output_operand_alias<") == 2
    assert "scatter" not in text
    case = make_case(2, 3, 8, 2, 32, "float32")
    text = lowered(partial(rotate_and_write, dtype=jnp.float32), *case)
    assert "custom_call @__gpu" not in text and "scatter" in text
