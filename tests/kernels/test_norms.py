"""Compares the root-mean-square norm with float64, and with itself bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu, norms, triton_gpu
from tests.kernels.test_mosaic_gpu import lowered

EPS = 1e-5
Norm = Callable[..., jax.Array]

IMPLEMENTATIONS: dict[str, Norm] = {
    "reference": norms.reference,
    "triton_gpu": partial(triton_gpu.rms_norm, interpret=True),
}
if cpu.available():
    IMPLEMENTATIONS["cpu"] = cpu.rms_norm
implementations = pytest.mark.parametrize("name", IMPLEMENTATIONS)
needs_library = pytest.mark.skipif(not cpu.available(), reason="the C++ library was not built")


def jitted(name: str, eps: float = EPS, dtype: jnp.dtype = jnp.float32) -> Norm:
    return jax.jit(partial(IMPLEMENTATIONS[name], eps=eps, dtype=dtype))


def make_case(*shape: int, x: str = "float32", scale: str = "float32") -> tuple[jax.Array, ...]:
    """Rows of different magnitudes, and a scale."""
    rng = np.random.default_rng(shape[-1])
    rows = rng.normal(size=shape) * np.exp(4 * rng.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(rows, x), jnp.asarray(rng.normal(size=shape[-1]), scale)


def same_bits(actual: jax.Array, expected: jax.Array | np.ndarray) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@implementations
@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
@pytest.mark.parametrize("x", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 3, 256), (1, 4, 3, 64), (5, 1), (3, 33), (2, 1000), (64,)])
@pytest.mark.covering(1)
def test_by_the_book(name: str, shape: tuple[int, ...], x: str, scale: str) -> None:
    operands = make_case(*shape, x=x, scale=scale)
    values, factors = (np.asarray(operand, np.float64) for operand in operands)
    exact = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS) * factors
    # All terms are positive, so the sum's relative error is at most its depth times 2^-24.
    np.testing.assert_allclose(jitted(name)(*operands), exact, rtol=2e-6)


@implementations
def test_bfloat16_is_the_rounded_result(name: str) -> None:
    x, scale = make_case(6, 100)
    x = x.at[1, 5].set(jnp.nan).at[2, 3].set(jnp.inf).at[3].set(0)
    y = jitted(name)(x, scale)
    rounded = jitted(name, dtype=jnp.bfloat16)(x, scale)
    assert rounded.dtype == jnp.bfloat16
    expected = y.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(rounded.astype(jnp.float32), expected)


@implementations
@pytest.mark.parametrize("x", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [5, 64, 1000])
@pytest.mark.covering(1)
def test_a_row_does_not_depend_on_the_others(name: str, width: int, x: str) -> None:
    rows, scale = make_case(140, width, x=x)  # with 1000 features, enough for two threads
    whole = jitted(name)(rows, scale)
    for m in (1, 2, 7, 8, 9, 33):
        same_bits(jitted(name)(rows[:m], scale), whole[:m])
    same_bits(jitted(name)(rows[::-1], scale), whole[::-1])
    same_bits(jitted(name)(rows.reshape(2, 5, 14, width), scale).reshape(140, width), whole)


@implementations
@pytest.mark.parametrize("width", [64, 100])
def test_a_row_does_not_depend_on_the_program(name: str, width: int) -> None:
    """XLA compiles the norm together with the operations around it, in a loop or not."""
    x, scale = make_case(9, width)
    y = jitted(name)(x + 1, scale)

    @jax.jit
    def inside(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        norm = partial(IMPLEMENTATIONS[name], eps=EPS)
        steps = jax.lax.map(lambda row: 2 * norm(row + 1, scale), x[:3])
        return steps, 2 * norm(x[4:6] + 1, scale)

    steps, two = inside(x, scale)
    same_bits(steps, 2 * y[:3])
    same_bits(two, 2 * y[4:6])


@needs_library
@pytest.mark.parametrize("width", [1, 31, 32, 100, 2048])
def test_the_order_of_the_sum(width: int) -> None:
    """Value i goes to sum i % 32, then halves are added, in float32 on any machine."""
    x, scale = (np.asarray(operand) for operand in make_case(3, width))
    padded = np.pad(x, ((0, 0), (0, -width % 32))).reshape(3, -1, 32)
    sums = np.zeros((3, 32), np.float32)
    for i in range(padded.shape[1]):
        sums += padded[:, i] * padded[:, i]
    while sums.shape[1] > 1:
        first, second = np.split(sums, 2, axis=1)
        sums = first + second
    inverse = 1 / np.sqrt(sums / np.float32(width) + np.float32(EPS))
    same_bits(jitted("cpu")(x, scale), x * inverse * scale)


@implementations
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    x, scale = make_case(4, 100)
    clean = jitted(name)(x, scale)
    dirty = jitted(name)(x.at[1, 99].set(jnp.nan).at[2].set(0), scale)
    same_bits(dirty[0], clean[0])
    same_bits(dirty[3], clean[3])
    assert np.isnan(dirty[1]).all() and (dirty[2] == 0).all()


@implementations
def test_vmap(name: str) -> None:
    x, scale = make_case(3, 4, 100)
    scales = jnp.stack([scale, 2 * scale, -scale])
    norm = jitted(name)
    whole = norm(x, scale)
    same_bits(jax.vmap(norm, (0, None))(x, scale), whole)
    same_bits(jax.vmap(jax.vmap(norm, (0, None)), (0, None))(x, scale), whole)
    for i, (together, alone) in enumerate(
        zip(jax.vmap(norm)(x, scales), jax.vmap(norm, (None, 0))(x[0], scales), strict=True)
    ):
        same_bits(together, norm(x[i], scales[i]))
        same_bits(alone, norm(x[0], scales[i]))


def test_a_gpu_takes_one_kernel() -> None:
    """XLA's own reduction of several rows has another order than that of one."""
    for rows in (1, 4):
        text = lowered(partial(norms.rms_norm, eps=EPS), *make_case(rows, 96, x="bfloat16"))
        assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
        assert "stablehlo.reduce" not in text


@implementations
def test_no_rows(name: str) -> None:
    assert jitted(name)(jnp.zeros((0, 64)), jnp.ones(64)).shape == (0, 64)


def test_the_door_takes_the_platforms_own() -> None:
    x, scale = make_case(3, 64, x="bfloat16", scale="bfloat16")
    own = "cpu" if cpu.available() else "reference"
    same_bits(norms.rms_norm(x, scale, EPS), jitted(own)(x, scale))


@pytest.mark.usefixtures("wrong_types")
@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (jnp.zeros((2, 64)), jnp.ones(63), r"scale must .* \(2, 64\), got \(63,\)"),
        (jnp.zeros(()), jnp.ones(()), r"scale must .* \(\), got \(\)"),
        (jnp.zeros((2, 64), jnp.float16), jnp.ones(64), "x must be .*, got float16"),
        (jnp.zeros((2, 64)), jnp.ones(64, jnp.int32), "scale must be .*, got int32"),
    ],
)
def test_the_door_refuses(x: jax.Array, scale: jax.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        norms.rms_norm(x, scale, EPS)


def test_the_door_refuses_another_result() -> None:
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32, got float16"):
        norms.rms_norm(jnp.zeros((2, 64)), jnp.ones(64), EPS, jnp.float16)


@needs_library
@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (jnp.zeros((2, 64)), jnp.ones(63), r"scale must be .* \[64\], got \[63\]"),
        (jnp.zeros((2, 64)), jnp.ones(()), r"scale must be .* \[64\], got \[\]"),
        (jnp.zeros((2, 64)), jnp.ones(64, jnp.int32), "scale must be bfloat16 or float32"),
        (jnp.zeros((2, 64), jnp.float16), jnp.ones(64), "x must be bfloat16 or float32"),
        (jnp.zeros(()), jnp.ones(64), r"x must be .*, got \[\]"),
        (jnp.zeros((4, 64)), jnp.ones((3, 64)), "3 scales do not fit 4 rows"),
        (jnp.zeros((4, 64)), jnp.ones((0, 64)), "0 scales do not fit 4 rows"),
    ],
)
def test_the_handler_refuses(x: jax.Array, scale: jax.Array, message: str) -> None:
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(cpu.rms_norm(x, scale, EPS))


@needs_library
@pytest.mark.parametrize("result", [((2, 63), jnp.float32), ((2, 64), jnp.float16)])
def test_the_handler_refuses_another_result(result: tuple) -> None:
    call = jax.ffi.ffi_call("specjax_rms_norm", jax.ShapeDtypeStruct(*result))
    with pytest.raises(Exception, match="the result"):
        jax.block_until_ready(call(jnp.zeros((2, 64)), jnp.ones(64), eps=np.float32(EPS)))
