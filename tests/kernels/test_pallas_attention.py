"""The accelerators' attention agrees with float64, and T and the neighbours do not change its bits.

The tests need no accelerator. Interpret mode tests the arithmetic, and compilation is tested up to
the input of the GPU's or TPU's compiler.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from pallas_kernels import attention_reference, mosaic_tpu, triton_gpu
from pallas_kernels.attention import IMPLEMENTATIONS, attention
from pallas_kernels.attention_operands import MOST_MASKED
from pallas_kernels.cache_entries import QuantizedEntries
from tests.kernels.test_cpu_attention import OPTIONS, Case, exact, make_case, operands_of
from tests.kernels.test_pallas_kernels import CUSTOM_CALLS, DEVICES, lowered
from tests.support.compiled import dequantize_entries, quantize_entries

KERNELS = {"cuda": triton_gpu.attention, "tpu": mosaic_tpu.attention}
JITTED = {
    platform: jax.jit(kernel, static_argnames=("window", "sinks", "head_scale", "interpret"))
    for platform, kernel in KERNELS.items()
}
platforms = pytest.mark.parametrize("platform", KERNELS)


def case_for(platform: str, t: int, lengths: list[int], slots: int = 640, **options) -> Case:
    """Four query heads per key-value head, of the smallest size that the kernel serves."""
    heads, e = (2, 32) if platform == "cuda" else (4, 128)
    options = {"cache": "bfloat16"} | options
    return make_case(len(lengths), t, 4 * heads, heads, e, slots, lengths, **options)


def options_of(case: Case) -> dict[str, object]:
    return {name: case[name] for name in OPTIONS}


def on(platform: str):
    """A context that traces code for the platform."""
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[platform]))


def interpreted(platform: str, case: Case) -> np.ndarray:
    """Runs the platform's kernel in interpret mode."""
    operands = operands_of(case, "mask")
    with on(platform):
        return np.asarray(JITTED[platform](*operands, **options_of(case), interpret=True))


def check(case: Case, y: np.ndarray) -> None:
    """Compares with float64, within the bounds of float32 and of rounded weights together.

    bfloat16 changes a weight by at most 2^-8 of itself, and thus the weighted mean by at most 2^-8
    of the largest value.
    """
    expected, bound = exact(case)
    if case["queries"].dtype == jnp.bfloat16:
        values = case["values"]
        if values.dtype == jnp.uint16:
            values = values.view(jnp.bfloat16)
        bound = bound + 2.0**-8 * np.abs(np.asarray(values, np.float64)).max()
    assert y.shape == expected.shape and y.dtype == np.float32
    assert (np.abs(y - expected) <= bound).all()


# Lengths of zero and around the edges of a block and a segment, so that new tokens cross them.
EDGES = [0, 1, 125, 127, 128, 511, 512]


@platforms
@pytest.mark.parametrize(
    ("t", "lengths", "mask", "window", "sinks"),
    [(3, EDGES, None, 130, 0), (3, EDGES, None, 130, 4), (40, [0, 100, 500], "tree", 20, 4)],
)
def test_agrees_with_float64(
    platform: str, t: int, lengths: list[int], mask: str | None, window: int | None, sinks: int
) -> None:
    case = case_for(platform, t, lengths, mask=mask, window=window, sinks=sinks)
    check(case, interpreted(platform, case))


@pytest.mark.exhaustive
def test_float32_and_heads_of_two_steps_on_tpus() -> None:
    case = make_case(3, 5, 16, 16, 128, 384, [0, 126, 300], mask="tree")
    check(case, interpreted("tpu", case))


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_on_gpus(bits: int) -> None:
    case = case_for("cuda", 3, [126, 600])
    entries = {
        name: quantize_entries(jax.lax.bitcast_convert_type(case[name], jnp.bfloat16), bits)
        for name in ("keys", "values")
    }
    y = interpreted("cuda", case | entries)
    check(case | {name: dequantize_entries(codes) for name, codes in entries.items()}, y)


@platforms
def test_agrees_with_the_reference(platform: str) -> None:
    # Values of about 1 differ by two bfloat16 roundings.
    case = case_for(platform, 3, EDGES, window=130)  # compiled above
    operands = jax.device_put(operands_of(case, "mask"))
    expected = attention_reference.attention(*operands, **options_of(case))
    np.testing.assert_allclose(interpreted(platform, case), expected, atol=2**-7)


@platforms
def test_t_neighbours_and_capacity_change_no_bit(platform: str) -> None:
    # Plain decoding computes one token at a time, alone and in a larger cache. The other call has
    # all tokens beside other rows, across blocks, segments and tiles. The TPU case has one tile,
    # because in interpret mode XLA picks an algorithm by the tile's rows.
    t = 35 if platform == "cuda" else 4
    together = case_for(platform, t, [510, 3, 250])
    y = interpreted(platform, together)
    check(together, y)
    room = ((0, 0), (0, 1024 - 640), (0, 0), (0, 0))
    for row, token in ((0, 0), (0, t // 2), (2, t - 1)):
        alone = together | {
            name: np.pad(together[name][row : row + 1], room) for name in ("keys", "values")
        }
        alone["queries"] = together["queries"][row : row + 1, token : token + 1]
        alone["positions"] = together["positions"][row : row + 1, token : token + 1]
        alone["lengths"] = together["lengths"][row : row + 1] + token
        np.testing.assert_array_equal(interpreted(platform, alone)[0, 0], y[row, token])


@platforms
def test_the_cache_may_have_more_rows(platform: str) -> None:
    case = case_for(platform, 3, [5, 130, 260])
    few = case | {name: case[name][:2] for name in ("queries", "lengths", "positions")}
    assert few["mask"] is None and few["keys"].shape[0] == 3
    np.testing.assert_array_equal(interpreted(platform, few), interpreted(platform, case)[:2])


@platforms
def test_t_chooses_nothing_but_the_number_of_tiles(platform: str) -> None:
    # These bits hold on a device if the program does not depend on T. On TPUs only the number of
    # rows in a tile may differ, so a symbol replaces it.
    def program(t: int) -> str:
        case = case_for(platform, t, [500])
        kernel = partial(KERNELS[platform], **options_of(case))
        with on(platform):
            jaxpr = jax.make_jaxpr(kernel)(*operands_of(case, "mask"))
        calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
        text = " ".join(" ".join(str(call.params["jaxpr"]) for call in calls).split())
        return re.sub(rf"\b{t if platform == 'cuda' else 4 * t}\b", "rows", text)

    assert program(12) == program(20) == program(28)  # 48, 80 and 112 rows


@platforms
def test_who_sees_nothing_gets_zeros(platform: str) -> None:
    case = case_for(platform, 3, [0, 100], slots=256, window=0)
    assert (interpreted(platform, case) == 0).all()
    blind = interpreted(platform, case | {"window": None, "mask": jnp.zeros((2, 3, 3), bool)})
    assert (blind[0] == 0).all() and (blind[1] != 0).any()


@platforms
def test_only_what_is_seen_is_read(platform: str) -> None:
    # Blocks that no token of the tile sees hold NaN, and the kernel does not read them.
    case = case_for(platform, 3, EDGES, window=130)
    nan = 0x7FC0
    poison = {name: case[name].copy() for name in ("keys", "values")}
    for entries in poison.values():
        entries[:2, 128:] = entries[2:5, 256:] = entries[5:, :256] = nan
    np.testing.assert_array_equal(interpreted(platform, case | poison), interpreted(platform, case))


# --- The public function, and the input of a platform's compiler.


def lowered_door(platform: str, case: Case) -> str:
    door = partial(attention, **options_of(case))
    return lowered(door, platform, *operands_of(case))


@pytest.mark.parametrize(("mask", "window"), [(None, None), ("tree", 100), (None, 300)])
def test_the_door_leads_to_the_platform_s_kernel(mask: str | None, window: int | None) -> None:
    case = make_case(2, 40, 8, 2, 128, 1024, [7, 600], cache="bfloat16", mask=mask, window=window)
    for platform in DEVICES:
        text = lowered_door(platform, case)
        for target, call in CUSTOM_CALLS.items():
            assert (call in text) == (target == platform)


def test_the_cache_is_read_as_it_is_stored() -> None:
    # No operation touches the cache before the kernel reads it.
    case = make_case(2, 3, 8, 2, 128, 1024, [7, 600], cache="bfloat16")
    for platform in KERNELS:
        kernel = partial(KERNELS[platform], **options_of(case))
        text = lowered(kernel, platform, *operands_of(case, "mask"))
        users = [line for line in text.splitlines() if "tensor<2x1x1024x2x128xui16>" in line]
        assert len(users) == 2 and "@main" in users[0] and CUSTOM_CALLS[platform] in users[1]


def test_codes_lower_for_gpus() -> None:
    case = make_case(2, 3, 8, 2, 128, 1024, [7, 600], cache="bfloat16")
    keys = jax.lax.bitcast_convert_type(case["keys"], jnp.bfloat16)
    for bits in (8, 4):
        codes = quantize_entries(keys, bits)
        text = lowered_door("cuda", case | {"keys": codes, "values": codes})
        assert CUSTOM_CALLS["cuda"] in text


def test_codes_beyond_32_bits_of_an_offset_are_refused() -> None:
    """Triton's offsets have 64 bits from 2^32 on, and below 2^31 they fit."""
    for slots, message in ((2**16, None), (2**16 + 128, "out of reach, got"), (2**17 + 128, None)):
        codes = jax.ShapeDtypeStruct((1, 32, slots, 8, 128), jnp.uint8)
        numbers = jax.ShapeDtypeStruct(codes.shape[:4], jnp.float32)
        keys = QuantizedEntries(codes, numbers, numbers, bits=8)
        queries = jax.ShapeDtypeStruct((1, 1, 32, 128), jnp.bfloat16)
        refused = triton_gpu.attention_refusal(queries, keys, None)
        assert refused is None if message is None else message in refused


def test_the_reference_serves_what_a_kernel_refuses() -> None:
    narrow, broad = (make_case(1, 2, 4, 2, e, 128, [9], cache="bfloat16") for e in (64, 256))
    wide = make_case(1, 2, 4, 2, 128, 128, [9], cache="bfloat16")
    codes = quantize_entries(jnp.zeros((1, 128, 2, 128), jnp.bfloat16), 8)
    tree = case_for("tpu", MOST_MASKED + 1, [9], mask="chain")
    refused = [
        ("cuda", make_case(1, 2, 4, 2, 64, 128, [9]), "queries must be bfloat16 .*got float32"),
        ("cuda", make_case(1, 2, 4, 2, 80, 128, [9], cache="bfloat16"), "power of two.*got 80"),
        ("cuda", tree, f"at most {MOST_MASKED} new tokens, got {MOST_MASKED + 1}"),
        ("tpu", tree, f"at most {MOST_MASKED} new tokens"),
        ("tpu", narrow, "head_dim must be 128, got 64"),
        ("tpu", broad, "head_dim must be 128, got 256"),
        ("tpu", wide | {"keys": codes, "values": codes}, "16 or 32 bits, got 8-bit codes"),
        ("tpu", make_case(1, 2, 3, 1, 128, 128, [9], cache="bfloat16"), "of 8 heads, got 1"),
        ("tpu", make_case(1, 2, 12, 12, 128, 128, [9], cache="bfloat16"), "of 8 heads, got 12"),
        ("tpu", make_case(1, 1, 36, 36, 128, 128, [9]), "must fit 8388608 bytes, got 9437184"),
    ]
    for platform, case, message in refused:
        with on(platform), pytest.raises(ValueError, match=message):
            KERNELS[platform](*operands_of(case, "mask"), **options_of(case))
        assert CUSTOM_CALLS[platform] not in lowered_door(platform, case)
    with pytest.raises(ValueError, match="must be a TPU"):
        mosaic_tpu.attention(*operands_of(wide, "mask"), **options_of(wide))


@pytest.mark.usefixtures("wrong_types")
def test_an_implementation_by_name() -> None:
    case = make_case(1, 2, 4, 2, 64, 128, [9])
    operands = jax.device_put(operands_of(case, "mask"))
    expected = attention_reference.attention(*operands, **options_of(case))
    y = attention(*operands, **options_of(case), implementation="reference")
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=f"one of {', '.join(IMPLEMENTATIONS)}, got 'cuda'"):
        attention(*operands, **options_of(case), implementation="cuda")
