"""Compares the MXFP4 cast with a search over the values of every scale."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from checkpoints_tools.quantization.mxfp4 import cast_to_mxfp4
from tests.support.compiled import dequantize

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by code
few = settings(max_examples=60, deadline=None)


def exponent(group: np.ndarray, rounding: str) -> int:
    """The group's power of two by definition, at least -127."""
    largest = np.abs(group).max()
    if largest == 0:
        return -127
    mantissa, power = np.frexp(largest)  # in 0.5 … 1
    raised = rounding == "even" and 2 * mantissa >= 1.75
    return max(int(power) - 1 - 2 + raised, -127)


def nearest(value: float) -> float:
    """The nearest E2M1 value. Ties go to the even code."""
    distances = np.abs(VALUES - abs(value))
    candidates = np.flatnonzero(distances == distances.min())
    code = next(code for code in candidates if len(candidates) == 1 or code % 2 == 0)
    return float(np.copysign(VALUES[code], value))


def expected(w: np.ndarray, rounding: str) -> np.ndarray:
    result = np.zeros(w.shape)
    for row, start in np.ndindex(len(w), -(-w.shape[1] // 32)):
        part = slice(32 * start, 32 * start + 32)
        scale = 2.0 ** exponent(w[row, part], rounding)
        result[row, part] = [
            nearest(value) * scale for value in w[row, part].astype(np.float64) / scale
        ]
    return result


# Multiples of an eighth include ties, zeros, the subnormal 0.5 and values that saturate.
eighths = st.integers(-64, 64).map(lambda i: i / 8)
magnitudes = st.sampled_from((1.0, 2.0**-100, 2.0**120, 1e-3, 1.0625))
matrices = st.tuples(hnp.arrays(np.float32, (2, 40), elements=eighths), magnitudes).map(
    lambda pair: pair[0] * np.float32(pair[1])
)


@pytest.mark.parametrize("rounding", ["floor", "even"])
@few
@given(matrices)
def test_cast_is_the_nearest(rounding: str, w: np.ndarray) -> None:
    np.testing.assert_array_equal(
        dequantize(cast_to_mxfp4(jnp.asarray(w), rounding)), expected(w, rounding)
    )


# "floor" rounds a largest magnitude of 7 to 6, and "even" to 8. They agree below 7.
def test_roundings_differ_from_seven_on() -> None:
    for largest, floor, even in ((6.9, 6, 6), (7.0, 6, 8), (7.9, 6, 8), (8.0, 8, 8)):
        w = jnp.zeros((1, 32)).at[0, 5].set(largest)
        assert dequantize(cast_to_mxfp4(w, "floor"))[0, 5] == floor
        assert dequantize(cast_to_mxfp4(w, "even"))[0, 5] == even


# The largest float32 saturates, tiny values become zeros, and a NaN or infinity affects its own
# group only.
def test_extremes() -> None:
    w = np.zeros((5, 64), np.float32)
    w[0, 0], w[1, 0] = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    w[2, 3], w[3, 3] = np.nan, np.inf
    w[:, 40] = 1
    for rounding in ("floor", "even"):
        weight = cast_to_mxfp4(jnp.asarray(w), rounding)
        values = np.asarray(dequantize(weight))
        assert values[0, 0] == 6 * 2.0**125
        assert abs(values[1, 0]) <= 2 * np.finfo(np.float32).tiny
        assert np.isnan(values[2:4, :32]).all() and not values[4, :32].any()
        assert (values[:, 40] == 1).all() and (weight.scales[2:4, 0] == 255).all()


def test_refusal() -> None:
    with pytest.raises(ValueError, match="rounding must be one of floor, even, got 'up'"):
        cast_to_mxfp4(jnp.zeros((1, 32)), "up")
