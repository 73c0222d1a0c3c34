"""Compares the gate of SwiGLU with float64, and with itself bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu, swiglu
from pallas_kernels.rounding import round_to

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {"reference": swiglu.reference}
if cpu.available():
    IMPLEMENTATIONS["cpu"] = cpu.swiglu
implementations = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def gated(name: str, gate: np.ndarray, up: np.ndarray, dtype: str = "float32") -> np.ndarray:
    run = jax.jit(partial(IMPLEMENTATIONS[name], dtype=jnp.dtype(dtype)))
    return np.asarray(run(*(jnp.asarray(each, jnp.float32) for each in (gate, up))))


@implementations
def test_by_the_book(name: str) -> None:
    """From where the sigmoid is hardly above zero to where it is one."""
    gate = np.concatenate([np.linspace(-80, 80, 20_011), np.geomspace(1e-30, 1, 500)])
    gate = gate.astype(np.float32).astype(np.float64)
    expected = gate / (1 + np.exp(-gate)) * 3
    # An ulp of the exponential, and half of one for each of the sum, quotient and product.
    np.testing.assert_allclose(gated(name, gate, np.full_like(gate, 3)), expected, rtol=2e-7)


@implementations
def test_beyond_the_exponentials_range(name: str) -> None:
    gate = np.array([np.nan, np.inf, 3e38, 200, -90, -200, -3e38, 0, -0.0, 1])
    y = gated(name, gate, np.array([1] * 9 + [np.nan]))
    assert np.isnan(y[[0, 9]]).all() and y[1] == np.inf and (y[7:9] == 0).all()
    np.testing.assert_array_equal(y[2:4], gate[2:4].astype(np.float32))
    np.testing.assert_allclose(y[4:7], 0, atol=5)  # -3e38 over e^88 is the worst
    np.testing.assert_allclose(y[4:6], 0, atol=1e-35)


@implementations
def test_bfloat16_is_the_rounded_result(name: str) -> None:
    gate, up = np.random.default_rng(0).normal(size=(2, 3, 1001))
    rounded = gated(name, gate, up, "bfloat16")
    expected = round_to(jnp.asarray(gated(name, gate, up)), jnp.bfloat16)
    np.testing.assert_array_equal(rounded.view(np.uint16), np.asarray(expected).view(np.uint16))


@pytest.mark.skipif(not cpu.available(), reason="the C++ library was not built")
def test_a_value_does_not_depend_on_the_others() -> None:
    gate, up = np.random.default_rng(0).normal(size=(2, 90, 1001))  # enough for two threads
    whole = gated("cpu", gate, up)
    for place in (np.s_[:1], np.s_[7:40, 3:], np.s_[:, 5:8]):
        np.testing.assert_array_equal(gated("cpu", gate[place], up[place]), whole[place])


def test_bad_input_gets_one_clear_sentence(wrong_types: None) -> None:
    gate = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match=r"of one shape \[2, 3\], got up float32\[2, 4\]"):
        swiglu.swiglu(gate, jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"got gate bfloat16\[2, 3\]"):
        swiglu.swiglu(gate.astype(jnp.bfloat16), gate)
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32, got float16"):
        swiglu.swiglu(gate, gate, jnp.float16)
