"""Compares the rotary embedding's rotation with float64, and with itself bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu, rope
from pallas_kernels.rounding import round_to

Operands = tuple[jax.Array, jax.Array, jax.Array]
Rotation = Callable[..., jax.Array]

IMPLEMENTATIONS: dict[str, Rotation] = {"reference": rope.reference}
if cpu.available():
    IMPLEMENTATIONS["cpu"] = cpu.rotate
implementations = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def jitted(name: str, dtype: str = "float32") -> Rotation:
    return jax.jit(partial(IMPLEMENTATIONS[name], dtype=jnp.dtype(dtype)))


def make_case(*shape: int) -> Operands:
    """x: [..., H, E], and the cosines and sines of random angles."""
    rng = np.random.default_rng(shape[-1])
    angles = rng.uniform(-10, 10, (*shape[:-2], shape[-1] // 2))
    arrays = rng.normal(size=shape), np.cos(angles), np.sin(angles)
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


def same_bits(actual: jax.Array, expected: jax.Array) -> None:
    assert actual.dtype == expected.dtype
    bits = np.uint16 if actual.dtype == jnp.bfloat16 else np.uint32
    np.testing.assert_array_equal(np.asarray(actual).view(bits), np.asarray(expected).view(bits))


@implementations
@pytest.mark.parametrize("shape", [(2, 3, 4, 64), (1, 1, 3, 2), (5, 2, 6), (3, 34), (2, 0)])
def test_by_the_book(name: str, shape: tuple[int, ...]) -> None:
    """Values i and i + E / 2 of a head form a complex number, multiplied by exp(i · angle)."""
    operands = make_case(*shape)
    x, cos, sin = (np.asarray(operand, np.float64) for operand in operands)
    half = shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[..., None, :]
    expected = np.concatenate((turned.real, turned.imag), axis=-1)
    np.testing.assert_allclose(jitted(name)(*operands), expected, rtol=0, atol=1e-6)


@implementations
def test_bfloat16_is_the_rounded_result(name: str) -> None:
    x, cos, sin = make_case(6, 3, 64)
    x = x.at[1, 1, 5].set(jnp.nan).at[2, 0, 3].set(jnp.inf).at[3].set(0).at[4].mul(1e-39)
    y, rounded = jitted(name)(x, cos, sin), jitted(name, "bfloat16")(x, cos, sin)
    same_bits(jnp.nan_to_num(rounded), jnp.nan_to_num(round_to(y, jnp.bfloat16)))
    np.testing.assert_array_equal(jnp.isnan(rounded), jnp.isnan(y))


@implementations
@pytest.mark.parametrize("width", [6, 64])
def test_a_row_does_not_depend_on_the_others(name: str, width: int) -> None:
    rows = make_case(600, 2, width)  # with 64 features, enough for two threads
    whole = jitted(name)(*rows)
    for m in (1, 2, 7, 33):
        same_bits(jitted(name)(*(operand[:m] for operand in rows)), whole[:m])
    same_bits(jitted(name)(*(operand[::-1] for operand in rows)), whole[::-1])


@implementations
def test_vmap(name: str) -> None:
    x, cos, sin = make_case(3, 4, 2, 64)
    rotate = jitted(name, "bfloat16")
    same_bits(jax.vmap(rotate)(x, cos, sin), rotate(x, cos, sin))
    shared = jax.vmap(rotate, (0, None, None))(x, cos[0], sin[0])
    same_bits(shared[2], rotate(x[2], cos[0], sin[0]))


@implementations
def test_no_rows(name: str) -> None:
    assert jitted(name)(*make_case(0, 2, 64)).shape == (0, 2, 64)


def test_the_door_takes_the_platforms_own() -> None:
    operands = make_case(3, 2, 64)
    own = "cpu" if cpu.available() else "reference"
    same_bits(rope.rotate(*operands, jnp.bfloat16), jitted(own, "bfloat16")(*operands))


@pytest.mark.usefixtures("wrong_types")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.zeros((3, 2, 5))}, r"x must be .* even E, got float32\[3, 2, 5\]"),
        ({"x": jnp.zeros(64)}, r"x must be .* got float32\[64\]"),
        ({"x": jnp.zeros((3, 2, 64), jnp.bfloat16)}, "x must be float32 .* got bfloat16"),
        ({"cos": jnp.zeros((3, 64))}, r"cos must .* got float32\[3, 64\]"),
        ({"sin": jnp.zeros((2, 32))}, r"sin must .* got float32\[2, 32\]"),
        ({"sin": jnp.zeros((3, 32), jnp.bfloat16)}, "sin must be float32 .* got bfloat16"),
        ({"dtype": jnp.float16}, "dtype must be bfloat16 or float32, got float16"),
    ],
)
def test_the_door_refuses(changes: dict[str, jax.Array], message: str) -> None:
    operands = dict(zip(("x", "cos", "sin"), make_case(3, 2, 64), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        rope.rotate(**operands)
