"""The Hopper kernel agrees with the reference and lowers for an H200, tested without a GPU.

Pallas's GPU interpreter (jax 0.11) tests the arithmetic. It does not support operands in registers,
so the index arithmetic of the layouts tests those. Compilation is tested up to the GPU compiler's
input; `benchmarks/kernels/compile_check_gpu.py` runs the compiler.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import mosaic_gpu, reference, words
from pallas_kernels.formats import (
    PLANE,
    Quantized,
    int4_from_integers,
    int8_from_integers,
    mxfp4_from_codes,
)
from pallas_kernels.mosaic_gpu import quantized_matmul, registers
from pallas_kernels.stacks import Stacked
from tests.support.compiled import dequantize
from tests.support.random_weights import random_minima

interprets = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax before 0.11 cannot interpret Mosaic GPU"
)
DECODERS = {
    "int4 bf16": words.INT4_BF16,
    "int4 int8": words.INT4_INT8,
    "mxfp4 bf16": words.MXFP4_BF16,
    "mxfp4 int8": words.MXFP4_INT8,
}
decoders = pytest.mark.parametrize("name", DECODERS)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def random_weight(name: str, n: int, k: int) -> Any:
    """A weight [N, K] with every integer. name: such as "int4 64 zeros", "int8 None" or "mxfp4"."""
    kind, *rest = name.split()
    rng = np.random.default_rng(n * k)
    if kind == "mxfp4":
        scales = rng.integers(118, 124, (n, -(-k // 32)))
        codes = rng.integers(0, 16, (n, k))
        return mxfp4_from_codes(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))
    group_size = None if rest[0] == "None" else int(rest[0])
    shape = n, 1 if group_size is None else -(-k // group_size)
    scales = jnp.asarray(rng.uniform(0.005, 0.04, shape), jnp.bfloat16)
    if kind == "int8":
        q = jnp.asarray(rng.integers(-128, 128, (n, k)), jnp.int8)
        minima = random_minima(scales, 256) if "minima" in rest else None
        return int8_from_integers(q, scales, group_size, minima=minima)
    minima = random_minima(scales, 16) if "minima" in rest else None
    zeros = jnp.asarray(rng.integers(-8, 8, shape), jnp.int8) if "zeros" in rest else None
    q = jnp.asarray(rng.integers(-8, 8, (n, k)), jnp.int8)
    return int4_from_integers(q, scales, group_size, zeros, minima=minima)


def random_rows(m: int, k: int) -> jax.Array:
    """Rows of different magnitudes: bf16[M, K]."""
    rng = np.random.default_rng(m + k)
    return jnp.asarray(rng.normal(size=(m, k)) * rng.uniform(0.1, 10, (m, 1)), jnp.bfloat16)


def stack_of(weight: Any) -> Any:
    """A stack of three, in which the weight is number 1."""
    return jax.tree.map(lambda leaf: jnp.stack((jnp.zeros_like(leaf), leaf, leaf[::-1])), weight)


def lowered(function, *args: object) -> str:
    """Lowers to the input of an H200's compiler."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def interpreted(x: jax.Array, weight: Quantized | Stacked, activation: str) -> np.ndarray:
    """Runs the kernel in interpret mode: f32[M, N]."""
    call = jax.jit(mosaic_gpu.matmul, static_argnames=("activation", "interpret"))
    return np.asarray(call(x, weight, activation=activation, interpret=True))


@decoders
def test_words_are_the_format_s_values(name: str) -> None:
    # Two rows hold all 256 bytes. The operands are the values of their two nibbles.
    decoder = DECODERS[name]
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, PLANE)
    for plane in (0, 1):
        nibbles = np.asarray(packed) >> 4 * plane & 0xF
        if name.startswith("int4"):
            values = np.where(nibbles > 7, nibbles - 16.0, nibbles) * decoder.factor
        else:
            values = np.where(nibbles > 7, -1, 1) * E2M1[nibbles & 7] * 2
        expected = jnp.asarray(values, jnp.float32)
        if decoder.dtype == jnp.bfloat16:
            expected = words.permute_inputs(expected)
        [operand] = words.unpack(packed, decoder, plane, PLANE, PLANE)
        assert operand.dtype == decoder.dtype
        np.testing.assert_array_equal(np.asarray(operand, np.float32), expected)


def places(layout, shape: tuple[int, int]) -> dict[tuple, tuple[np.ndarray, np.ndarray]]:
    """The matrix index of each register's first value, for each of 128 threads."""
    tiled, threads = layout.tiling.tile_shape(shape), np.arange(128)
    found = {}
    for index in np.ndindex(layout.registers_shape(shape)):
        at: list = list(index)
        for dims, number in ((layout.warp_dims, threads // 32), (layout.lane_dims, threads % 32)):
            for dim in reversed(dims):
                at[dim] = number % tiled[dim]
                number = number // tiled[dim]
        found[index] = layout.tiling.untile_indices(tuple(at))
    return found


def numbers(word: words.ArrayWord, decoder: words.Decoder) -> np.ndarray:
    """`registers._number` on arrays, with one row per thread."""
    bits = np.asarray(word.value)[:, None]
    if decoder.dtype == jnp.int8:
        return bits.view(np.int8)
    values = bits.view(jnp.bfloat16).astype(np.float64)
    return (values - decoder.offset) * decoder.multiplier


@decoders
@pytest.mark.parametrize("group", [32, 64, 128])
def test_registers_hold_what_the_words_say(name: str, group: int, monkeypatch) -> None:
    # The kernel's code moves registers, here for all threads at once, with arrays instead of traced
    # values. JAX's layouts define the operand that each register holds.
    decoder, rng = DECODERS[name], np.random.default_rng(group)
    packed = rng.integers(0, 256, (64, PLANE), dtype=np.uint8)
    integer = decoder.dtype == jnp.int8
    width, count = (max(group, 64), 4) if integer else (group, 2)
    monkeypatch.setattr(registers, "_word", words.ArrayWord)
    monkeypatch.setattr(registers, "_number", numbers)
    monkeypatch.setattr(registers, "_zeros", lambda: 0)
    source = registers.PACKED.to_mgpu()
    target = (registers.PACKED if integer else registers.ACCUMULATOR).to_mgpu()
    held = np.empty(source.registers_shape((64, PLANE)), object)
    for index, (row, column) in places(source, (64, PLANE)).items():
        four = [packed[row, column + i] for i in range(4)]
        held[index] = np.stack(four, -1).view(np.uint32)[:, 0]
    for plane in (0, 1):
        expected = words.unpack(jnp.asarray(packed), decoder, plane, group, width)
        found = registers._groups(registers._plane(held, decoder, plane), group, width)
        for operand, part in zip(expected, found, strict=True):
            assert part.shape == target.registers_shape((64, width))
            for index, (row, column) in places(target, (64, width)).items():
                values = np.stack([np.asarray(operand)[row, column + i] for i in range(count)], -1)
                np.testing.assert_array_equal(part[index], values)


CASES = [  # weight, M, N, K, activation
    ("int4 128", 1, 64, 172, "a16"),
    ("int4 128", 9, 128, 2300, "a8"),
    ("int4 128 zeros", 20, 64, 300, "a16"),
    ("int4 128", 3, 192, 300, "a4"),
    ("int4 64 zeros", 70, 64, 300, "a16"),
    ("int4 32 zeros", 3, 64, 300, "a8"),
    ("int4 None zeros", 3, 64, 2300, "a8"),
    ("int4 None zeros", 3, 64, 300, "a16"),
    ("mxfp4", 3, 64, 300, "a16"),
    ("mxfp4", 9, 64, 300, "a8"),
]


@interprets
@pytest.mark.parametrize("case", CASES)
def test_the_meaning_is_the_reference(case: tuple) -> None:
    # |kernel − reference| ≤ 2^-20 · Σ_k |x[m, k] · w[n, k]|, 16 float32 roundings. One misplaced
    # nibble, scale or zero costs at least 2^-10.
    name, m, n, k, activation = case
    x, weight = random_rows(m, k), random_weight(name, n, k)
    y = interpreted(x, weight, activation)
    sizes = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(dequantize(weight))).T
    assert y.shape == (m, n) and y.dtype == np.float32
    # The reference would split a bfloat16 x into integers for 8-bit weights.
    expected = reference.matmul(x.astype(jnp.float32), weight, activation)
    error = np.abs(y - np.asarray(expected))
    assert np.all(error <= sizes * 2.0**-20)


@interprets
@pytest.mark.parametrize(("name", "activation"), [("int4 128", "a16"), ("int4 64 zeros", "a8")])
def test_weights_that_share_a_kernel_have_the_bits_that_they_have_alone(
    name: str, activation: str
) -> None:
    # Queries, keys and values; the last weight is of another kind and gets a kernel of its own.
    x, names = random_rows(9, 1200), (name, name, name, "mxfp4")
    weights = [
        random_weight(each, n, 1200) for each, n in zip(names, (192, 64, 128, 64), strict=True)
    ]
    kernels = str(jax.make_jaxpr(lambda x: mosaic_gpu.products(x, weights, activation))(x))
    assert kernels.count("name=specjax_matmul") == 2
    call = jax.jit(mosaic_gpu.products, static_argnames=("activation", "interpret"))
    together = call(x, weights, activation=activation, interpret=True)
    for y, weight in zip(together, weights, strict=True):
        np.testing.assert_array_equal(y, interpreted(x, weight, activation))


@interprets
@pytest.mark.parametrize(
    ("name", "activation"), [("int4 64 zeros", "a8"), ("int4 None zeros", "a8"), ("mxfp4", "a16")]
)
def test_a_matrix_in_a_stack_has_the_bits_of_the_matrix_alone(name: str, activation: str) -> None:
    x, weight = random_rows(9, 600), random_weight(name, 64, 600)
    one = Stacked(stack_of(weight), jnp.int32(1))
    assert mosaic_gpu.supports(one)
    np.testing.assert_array_equal(
        interpreted(x, one, activation), interpreted(x, weight, activation)
    )


@interprets
@pytest.mark.parametrize(("name", "activation"), [("int4 128", "a16"), ("int4 64 zeros", "a8")])
def test_a_row_does_not_depend_on_the_others(name: str, activation: str, monkeypatch) -> None:
    # The number of rows varies, and the kernel or XLA adds the segments' sums. Rows are integers,
    # because the interpreter only shows the order of groups and segments. Only a GPU can show how a
    # tensor core adds within a group.
    monkeypatch.setattr(quantized_matmul, "SEGMENT_ITEMS", 2)
    x, weight = jnp.round(random_rows(33, 2304)), random_weight(name, 128, 2304)
    y = interpreted(x, weight, activation)
    expected = reference.matmul(x.astype(jnp.float32), weight, activation)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))
    np.testing.assert_array_equal(interpreted(x[:1], weight, activation), y[:1])
    np.testing.assert_array_equal(interpreted(x[::-1][:9], weight, activation)[::-1], y[24:])
    planned = quantized_matmul.make_plan
    # Blocks are multiplied together, sums stay in registers, and sums are kept in memory.
    for m, together, stay in ((1, 1 + (name == "int4 128"), True), (9, 1, True), (33, 1, False)):
        plan = planned(m, [weight], activation, interpret=True)
        assert plan.parts == plan.segments == 2
        assert (plan.together, plan.sums_stay) == (together, stay)
        whole = dataclasses.replace(plan, parts=1)
        monkeypatch.setattr(quantized_matmul, "make_plan", lambda *_, whole=whole: whole)
        unsplit = mosaic_gpu.matmul(x[:m], weight, activation, interpret=True)
        np.testing.assert_array_equal(np.asarray(unsplit), y[:m])


@pytest.mark.parametrize("name", ["int4 128", "int4 64 zeros", "mxfp4"])
def test_rows_choose_no_order_of_summation(name: str) -> None:
    # Groups, operands and segments are the same for every M.
    weight = random_weight(name, 192, 5000)
    for activation in ("a16", "a8"):
        plans = [
            quantized_matmul.make_plan(m, [weight], activation)
            for m in (1, 8, 9, 40, 200, 5000, 10**6)
        ]
        orders = {(p.blocks, p.per_segment, p.group, p.width, p.decoder) for p in plans}
        assert len(orders) == 1
        assert {p.parts for p in plans} == {1, plans[0].segments}


LOWERED = [
    ("int4 128", 1, "a16"),
    ("int4 128", 128, "a8"),
    ("int4 64 zeros", 16, "a8"),
    ("int4 32", 16, "a16"),
    ("int4 None", 1, "a4"),
    ("mxfp4", 64, "a8"),
]


@pytest.mark.parametrize("case", LOWERED)
def test_it_lowers(case: tuple) -> None:
    name, m, activation = case
    x, weight = random_rows(m, 1024), random_weight(name, 192, 1024)
    text = lowered(lambda x, w: mosaic_gpu.matmul(x, w, activation), x, weight)
    assert text.count("custom_call @mosaic_gpu") == 1


def test_the_target_is_known_when_tracing() -> None:
    for name, answer in (("NVIDIA H200", True), ("NVIDIA A100-SXM4-40GB", False)):
        mesh = AbstractMesh((), (), abstract_device=AbstractDevice(name, 132, "gpu"))
        with use_abstract_mesh(mesh):
            assert mosaic_gpu.is_hopper() == answer
    assert mosaic_gpu.is_hopper() == any(
        getattr(device, "compute_capability", "") == "9.0" for device in jax.devices()
    )


def test_what_it_cannot_serve_is_refused() -> None:
    x = random_rows(3, 256)
    for name, n, message in (
        ("int4 128", 96, r"mosaic_gpu serves .* 64 outputs, got Int4Weight of shape \(96, 256\)"),
        ("int8 128", 64, r"mosaic_gpu serves Int4Weight and Mxfp4Weight .* got Int8Weight"),
    ):
        weight = random_weight(name, n, 256)
        assert not mosaic_gpu.supports(weight)
        with pytest.raises(ValueError, match=message):
            mosaic_gpu.matmul(x, weight)
    assert mosaic_gpu.supports(random_weight("mxfp4", 64, 256))
    with pytest.raises(ValueError, match="activation must be one of a16, a8, a4, got 'a6'"):
        mosaic_gpu.matmul(x, random_weight("mxfp4", 64, 256), "a6")
