"""The TPU kernel agrees with the reference in every format, and rows do not affect each other.

The tests need no TPU. Interpret mode tests the arithmetic. Compilation is tested up to the TPU
compiler's input; `benchmarks/kernels/compile_check_tpu.py` runs the compiler.
`tests/kernels/test_pallas_kernels.py` has the tests that the GPU kernel shares.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import mosaic_tpu, reference
from pallas_kernels.formats import Quantized, int4_from_integers, mxfp4_from_codes
from pallas_kernels.matmul import matmul
from pallas_kernels.mosaic_tpu import tiles
from pallas_kernels.planes import joined
from tests.support.compiled import dequantize
from tests.support.covering import representatives
from tests.support.random_weights import random_int4, random_rows, random_weight, with_outliers

FORMATS = ("int4-32", "int4-64", "int4-128", "int4-channel", "int4-32-zeros", "int4-128-zeros",
           "int4-channel-zeros", "int4-32-minima", "int4-channel-minima", "mxfp4", "int8-64",
           "int8-32-minima", "int8-channel")  # fmt: skip
CHIPS = {"TPU v4": False, "TPU v5 lite": True, "TPU v6 lite": True, "TPU7x": False}  # int8?
VMEM = 16 * 2**20

# Rows fill one register or several. Inputs fill part of a group and block, whole turns of the
# kernel's loop, or a turn and a block. Outputs fill part of a tile.
SHAPES = ((1, 37, 172), (33, 300, 1024), (17, 37, 1200))  # M, N, K
CASES = [
    (name, activation, *SHAPES[(i + j) % 3])
    for i, name in enumerate(FORMATS)
    for j, activation in enumerate(("a16", "a8"))
]
CASES += [("int4-128", "a4", *SHAPES[2]), ("int4-channel", "a4", *SHAPES[1])]
CASES += [("int4-32-zeros", "a16", 1, 37, 4096)]  # enough groups for the other layout


def interpreted(x: jax.Array, weight: Quantized, activation: str, int8: bool = True) -> np.ndarray:
    """Runs the kernel in interpret mode: f32[M, N]."""
    call = jax.jit(mosaic_tpu.matmul, static_argnames=("activation", "int8_products", "interpret"))
    return np.asarray(call(x, weight, activation=activation, int8_products=int8, interpret=True))


@pytest.mark.parametrize(("name", "activation", "m", "n", "k"), CASES)
@pytest.mark.covering(1)
def test_the_meaning_is_the_reference(name: str, activation: str, m: int, n: int, k: int) -> None:
    # |kernel − reference| ≤ 2^-20 · Σ_k |x[m, k] · w[n, k]|, 16 float32 roundings. One misplaced
    # nibble, scale or zero costs at least 2^-10.
    x, weight = random_rows(m, k), random_weight(name, n, k)
    y = interpreted(x, weight, activation)
    sizes = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(dequantize(weight))).T
    # The reference would split a bfloat16 x into integers for 8-bit weights.
    expected = reference.matmul(x.astype(jnp.float32), weight, activation)
    error = np.abs(y - np.asarray(expected))
    assert y.shape == (m, n) and y.dtype == np.float32
    assert np.all(error <= sizes * 2.0**-20)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in FORMATS if "minima" not in name])
def test_a_row_of_the_identity_reads_one_weight(name: str) -> None:
    # With x = 1 the result is the weight, bit for bit.
    weight = random_weight(name, 40, 256)
    y = interpreted(jnp.eye(256, dtype=jnp.bfloat16), weight, "a16")
    np.testing.assert_array_equal(y, np.asarray(dequantize(weight)).T)


def test_mxfp4_reads_every_code_and_scale() -> None:
    # Scales run from the smallest that is normal in float32 to the largest, and NaN.
    scales = np.repeat(np.arange(3, 256, dtype=np.uint8)[:, None], 8, axis=1)
    codes = np.tile(np.arange(16, dtype=np.uint8), (253, 16))
    weight = mxfp4_from_codes(jnp.asarray(codes), jnp.asarray(scales))
    y = interpreted(jnp.eye(256, dtype=jnp.bfloat16), weight, "a16")
    np.testing.assert_array_equal(y, np.asarray(dequantize(weight)).T)
    assert np.all(np.isnan(y[:, -1])) and not np.any(np.isnan(y[:, :-1]))


@pytest.mark.parametrize(
    "name",
    representatives(["int4-32", "int4-128-zeros", "int4-channel-zeros", "mxfp4"], "int4-128-zeros"),
)
def test_bfloat16_products_of_integers_are_exact(name: str) -> None:
    # Chips with and without int8 products give the same bits.
    x, weight = random_rows(9, 700), random_weight(name, 96, 700)
    np.testing.assert_array_equal(
        interpreted(x, weight, "a8", int8=False), interpreted(x, weight, "a8", int8=True)
    )


@pytest.mark.parametrize(
    ("name", "activation"),
    representatives(
        [("int4-128-zeros", "a16"), ("int4-32", "a16"), ("int4-channel", "a16"), ("mxfp4", "a8")],
        ("int4-32", "a16"),
        ("mxfp4", "a8"),
    ),
)
def test_a_row_does_not_depend_on_the_others(name: str, activation: str) -> None:
    # A row has the same bits for any number of rows and at any position, although the tiles differ:
    # 16 or 32 rows, 48 or 64, and two tiles of 150 or more.
    x, weight = random_rows(300, 300), random_weight(name, 96, 300)
    y = interpreted(x, weight, activation)
    for m in (1, 9, 33):
        np.testing.assert_array_equal(interpreted(x[:m], weight, activation), y[:m])
    np.testing.assert_array_equal(interpreted(x[::-1], weight, activation)[::-1], y)


def test_a_row_does_not_depend_on_the_size_of_its_tile() -> None:
    # The programs for different M differ only in the number of rows: with a symbol in its place,
    # their texts are equal.
    weight = random_int4(96, 2400)

    def program(m: int) -> str:
        jaxpr = jax.make_jaxpr(mosaic_tpu.matmul)(random_rows(m, 2400), weight)
        [call] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
        total = call.params["jaxpr"].invars[-1].aval  # it has as many rows as the tile
        return re.sub(rf"\b{total.shape[0]}\b", "rows", " ".join(str(call.params["jaxpr"]).split()))

    assert program(32) == program(48) == program(96)


def test_zeros_of_all_inputs_do_not_overflow() -> None:
    # The result is Σ 127 · (7 + 128) over 8448 inputs, but 16 · 127 · 128 · 8448 > 2^31.
    q = jnp.full((1, 8448), 7, jnp.int8)
    ones = jnp.ones((1, 1), jnp.float32)
    weight = int4_from_integers(q, ones, None, jnp.full((1, 1), -128, jnp.int8))
    y = interpreted(jnp.full((1, 8448), 127, jnp.float32), weight, "a8")
    np.testing.assert_allclose(y, 127 * 135 * 8448, rtol=1e-6)


def lowered(chip: str, function, *args: object) -> str:
    """Lowers to the input of the chip's compiler."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(chip, 1, "tpu"))):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("chip", CHIPS)
def test_int8_is_multiplied_where_the_chip_does(chip: str) -> None:
    x, weight = random_rows(3, 512), random_int4(96, 512)
    text = lowered(chip, lambda x, w: mosaic_tpu.matmul(x, w, "a8"), x, weight)
    [call] = [line for line in text.splitlines() if "@tpu_custom_call" in line]
    assert ("tensor<32x512xi8>" in call) == CHIPS[chip]
    assert ("tensor<16x512xbf16>" in call) == (not CHIPS[chip])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_lowers_and_is_read_as_it_is_stored(name: str) -> None:
    # One kernel reads the stored integers, and no other operation touches them.
    x, weight = random_rows(17, 512), random_weight(name, 300, 512)
    text = lowered("TPU v6 lite", lambda x, w: mosaic_tpu.matmul(x, w, "a8"), x, weight)
    stored = "300x512xi8" if name.startswith("int8") else "300x256xui8"
    users = [line for line in text.splitlines() if f"tensor<{stored}>" in line]
    assert text.count("@tpu_custom_call") == 1
    assert len(users) == 2 and "func.func public @main" in users[0] and "custom_call" in users[1]


@pytest.mark.parametrize("packing", [16, 32])
def test_tiles_fit_the_memory_of_a_tpu(packing: int) -> None:
    # VMEM holds two steps' weights and results, one step's sums and products, x and all scales.
    for m in (1, 8, 32, 128, 300, 4096):
        for k, n in ((2048, 512), (4096, 4096), (14336, 4096), (18944, 3584), (53248, 16384)):
            row = k * 32 // packing
            tile = tiles.choose(m, n, weight_bytes=k // 2, row_bytes=row, packing=packing,
                                groups_per_plane=1)  # fmt: skip
            x = tile.rows * row * min(tile.count, 2)
            weights, results = tile.columns * k, tile.rows * tile.columns * 4 * 4
            assert tile.rows * tile.count >= m and tile.rows % packing == 0
            assert x + weights + results + tile.columns * (k // 128) * 8 <= VMEM


def test_what_the_kernel_cannot_serve_is_refused() -> None:
    x, weight = random_rows(3, 256), random_int4(96, 256, zeros=True)
    mxfp4, int8 = (random_weight(name, 96, 256) for name in ("mxfp4", "int8-64"))
    refused = {
        r"zeros must be int8\[96, 2\], got int8\[96, 1\]": dataclasses.replace(
            weight, zeros=weight.zeros[:, :1]
        ),
        "weight must have no outliers": with_outliers(96, 256),
        r"scales must be uint8\[96, 8\], got uint8\[96, 4\]": dataclasses.replace(
            mxfp4, scales=mxfp4.scales[:, :4]
        ),
        r"integers must be int8\[96, 256\], got int8\[96, 128\]": dataclasses.replace(
            int8, integers=int8.integers[:, :128]
        ),
        r"x of shape \(3, 256\).*\(96, 300\)": random_weight("mxfp4", 96, 300),
    }
    for message, wrong in refused.items():
        with pytest.raises(ValueError, match=message):
            mosaic_tpu.matmul(x, wrong)


@pytest.mark.parametrize(("n", "k"), [(37, 172), (300, 2304)])
def test_bfloat16_products_and_their_rows(n: int, k: int) -> None:
    # Part of a step, and two steps and a part. |kernel − exact| ≤ 2^-20 · Σ_k |x[m, k] · w[n, k]|;
    # a misplaced input costs 2^-8 or more. A row has the same bits for any number of rows.
    x, weight = random_rows(300, k), random_weight("bfloat16", n, k)
    call = jax.jit(mosaic_tpu.matmul, static_argnames="interpret")
    y = np.asarray(call(x, weight, interpret=True))
    wide, w = np.asarray(x, np.float64), np.asarray(dequantize(weight), np.float64)
    assert y.shape == (300, n) and y.dtype == np.float32
    assert np.all(np.abs(y - wide @ w.T) <= np.abs(wide) @ np.abs(w).T * 2.0**-20)
    for m in (1, 33):
        np.testing.assert_array_equal(call(x[:m], weight, interpret=True), y[:m])


@pytest.mark.parametrize("name", ["nested8-64", "nested8-channel"])
def test_planes_of_8_bits_have_the_bits_of_8_bits(name: str) -> None:
    weight, x = random_weight(name, 40, 700), random_rows(17, 700)
    y, whole = (interpreted(x, each, "a16") for each in (weight, joined(weight)))
    np.testing.assert_array_equal(y, whole)
    with pytest.raises(ValueError, match=r"weight must be one of .* got NestedInt8Weight"):
        mosaic_tpu.matmul(x, weight, "a8")


@pytest.mark.parametrize("name", ["bfloat16", "nested8-64", "int4-128"])
def test_the_door_takes_the_kernel(name: str) -> None:
    x, weight = random_rows(17, 512), random_weight(name, 300, 512)
    text = lowered("TPU v6 lite", matmul, x, weight)
    assert text.count("@tpu_custom_call") == 1
