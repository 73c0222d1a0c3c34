"""The accelerator kernels agree with the reference and lower for their devices.

The tests need no accelerator. Interpret mode tests the arithmetic, and compilation is tested up to
the input of the GPU's or TPU's compiler.
"""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_kernels.matmul as door
from pallas_kernels import mosaic_tpu, reference, triton_gpu
from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.formats import GROUP_SIZES, Int4Weight, int4_from_integers, padded_inputs
from pallas_kernels.interleave import interleave
from tests.support.compiled import dequantize, quantize_activations
from tests.support.random_weights import random_int4, random_rows

KERNELS = {"cuda": triton_gpu.matmul, "tpu": mosaic_tpu.matmul}
CUSTOM_CALLS = {"cuda": "custom_call @__gpu$xla.gpu.triton", "tpu": "custom_call @tpu_custom_call"}
DEVICES = {
    "cuda": AbstractDevice("NVIDIA H200", 132, "gpu"),
    "tpu": AbstractDevice("TPU v6 lite", 1, "tpu"),
    "cpu": None,
}

# The cases cover every pair of values of any two columns. The last three have several tiles of M,
# and blocks that do not fill whole turns of the TPU kernel's loop.
CASES = [  # M, N, K, group size, scales, activation
    (1, 96, 64, 32, "bfloat16", "a16"),
    (1, 300, 172, 64, "float16", "a16"),
    (1, 300, 256, 128, "float32", "a8"),
    (1, 256, 896, None, "bfloat16", "a4"),
    (3, 256, 64, 64, "float16", "a8"),
    (3, 300, 172, 32, "float32", "a4"),
    (3, 300, 256, None, "bfloat16", "a16"),
    (3, 96, 896, 128, "float16", "a16"),
    (8, 300, 64, 128, "float32", "a4"),
    (8, 96, 172, None, "bfloat16", "a8"),
    (8, 256, 256, 32, "float16", "a16"),
    (8, 300, 896, 64, "float32", "a16"),
    (17, 300, 64, None, "bfloat16", "a16"),
    (17, 256, 172, 128, "float16", "a16"),
    (17, 96, 256, 64, "float32", "a4"),
    (17, 300, 896, 32, "bfloat16", "a8"),
    (40, 37, 2304, 128, "float16", "a16"),
    (40, 37, 2304, 128, "float32", "a8"),
    (40, 37, 2304, None, "bfloat16", "a8"),
]

platforms = pytest.mark.parametrize("platform", KERNELS)


def interpreted(platform: str, x: jax.Array, weight: Int4Weight, activation: str) -> np.ndarray:
    """Runs the platform's kernel in interpret mode: f32[M, N]."""
    call = jax.jit(KERNELS[platform], static_argnames=("activation", "interpret"))
    return np.asarray(call(x, weight, activation=activation, interpret=True))


def represented(x: jax.Array, weight: Int4Weight, activation: str) -> np.ndarray:
    """The values of the quantized activations: f64[M, K]."""
    m, k = x.shape
    if activation == "a16":
        return np.asarray(x, np.float64)
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padded_inputs(k) - k)))
    q, scales = quantize_activations(x, activation, weight.group_size)
    groups = np.asarray(q, np.float64).reshape(m, scales.shape[1], -1)
    return (groups * np.asarray(scales, np.float64)[:, :, None]).reshape(m, -1)[:, :k]


@platforms
@pytest.mark.parametrize(("m", "n", "k", "group_size", "dtype", "activation"), CASES)
@pytest.mark.covering(1)
def test_the_meaning_is_the_reference(
    platform: str, m: int, n: int, k: int, group_size: int | None, dtype: str, activation: str
) -> None:
    # |kernel − exact| and |kernel − reference| ≤ 2^-20 · Σ_k |x[m, k] · w[n, k]|, 16 float32
    # roundings. One misplaced nibble or scale costs at least 2^-10.
    x, weight = random_rows(m, k), random_int4(n, k, group_size, dtype)
    y = interpreted(platform, x, weight, activation)
    values, w = represented(x, weight, activation), np.asarray(dequantize(weight), np.float64)
    bound = np.abs(values) @ np.abs(w).T * 2.0**-20
    assert y.shape == (m, n) and y.dtype == np.float32
    assert np.all(np.abs(y - values @ w.T) <= bound)
    assert np.all(np.abs(y - np.asarray(reference.matmul(x, weight, activation))) <= bound)


@pytest.mark.optimized
@platforms
@pytest.mark.parametrize(("activation", "group_size"), [("a16", 64), ("a8", 128), ("a4", None)])
@pytest.mark.covering(1)
def test_a_row_does_not_depend_on_the_others(
    platform: str, activation: str, group_size: int | None
) -> None:
    # A row has the same bits for any number of rows and at any position.
    x, weight = random_rows(33, 300), random_int4(96, 300, group_size)
    y = interpreted(platform, x, weight, activation)
    for m in (1, 17):
        np.testing.assert_array_equal(interpreted(platform, x[:m], weight, activation), y[:m])
    np.testing.assert_array_equal(interpreted(platform, x[::-1], weight, activation)[::-1], y)


@platforms
def test_without_groups_the_integers_are_summed_exactly(platform: str) -> None:
    # 1 · 3 + 16709 · 127 · -8 + 19096 · 127 · 7 = 3. The partial sum is odd and beyond 2^24, so a
    # float32 accumulator returns 4.
    x = jnp.full((1, 35806), 127, jnp.float32).at[:, 0].set(1)
    row = np.repeat(np.array([3, -8, 7], np.int8), [1, 16709, 19096])
    weight = int4_from_integers(jnp.asarray(row[None]), jnp.ones((1, 1), jnp.float32), None)
    np.testing.assert_allclose(interpreted(platform, x, weight, "a8"), 3, rtol=1e-6)


@platforms
def test_a16_rounds_float32_to_bfloat16(platform: str) -> None:
    x = random_rows(3, 256).astype(jnp.float32) * 1.001
    weight = random_int4(96, 256, 128)
    rounded = interpreted(platform, x.astype(jnp.bfloat16), weight, "a16")
    np.testing.assert_array_equal(interpreted(platform, x, weight, "a16"), rounded)


def lowered(function, platform: str, *args: object) -> str:
    """Lowers to the input of the platform's compiler, without a device."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[platform])):
        return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@platforms
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.covering(1)
def test_the_kernel_lowers(platform: str, activation: str, group_size: int | None) -> None:
    x, weight = random_rows(17, 2304), random_int4(300, 2304, group_size)
    kernel = KERNELS[platform]
    text = lowered(lambda x, weight: kernel(x, weight, activation), platform, x, weight)
    quantizes = platform == "cuda" and activation != "a16"  # x, by a kernel of its own
    assert text.count(CUSTOM_CALLS[platform]) == 1 + quantizes


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_door_leads_to_the_platform_s_kernel(activation: str) -> None:
    x, weight = random_rows(3, 512), random_int4(96, 512, 128)
    for platform in DEVICES:
        for each in (weight, interleave(weight)):  # only CPU kernels read interleaved weights
            text = lowered(lambda x, w: door.matmul(x, w, activation), platform, x, each)
            for target, call in CUSTOM_CALLS.items():
                assert (call in text) == (target == platform)


@platforms
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_weight_is_unpacked_inside_the_kernel(platform: str, activation: str) -> None:
    # No operand or result of the kernel has more elements than the packed weight.
    x, weight = random_rows(3, 512), random_int4(96, 512, 128)
    text = lowered(lambda x, w: door.matmul(x, w, activation), platform, x, weight)
    shapes = [shape.split("x") for shape in re.findall(r"tensor<([\dx]+)x[a-z]", text)]
    assert max(math.prod(map(int, shape)) for shape in shapes) == weight.packed.size


@platforms
def test_what_a_kernel_cannot_serve_is_refused(platform: str) -> None:
    kernel, weight, x = KERNELS[platform], random_int4(96, 256, 128), random_rows(3, 256)
    refused = {
        r"x of shape \(3, 255\).*\(96, 256\)": (x[:, 1:], weight, "a16"),
        r"x of shape \(1, 3, 256\)": (x[None], weight, "a16"),
        r"x of shape \(0, 256\)": (x[:0], weight, "a16"),
        "x must be bfloat16 or float32, got float16": (x.astype(jnp.float16), weight, "a16"),
        "must be one of Int4Weight, .*got ArrayImpl": (x, dequantize(weight), "a16"),
        "activation must be one of a16, a8, a4, got 'a6'": (x, weight, "a6"),
        "group_size must be .* got 16": (
            x, Int4Weight(weight.packed, weight.scales, 256, 16), "a8"),
        r"packed must be uint8\[96, 256\], got uint8\[96, 128\]": (
            random_rows(3, 300), Int4Weight(weight.packed, weight.scales, 300), "a8"),
        r"scales must be .*\[96, 8\], got bfloat16\[96, 2\]": (
            x, Int4Weight(weight.packed, weight.scales, 256, 32), "a8"),
    }  # fmt: skip
    for message, args in refused.items():
        with pytest.raises(ValueError, match=message):
            kernel(*args)
