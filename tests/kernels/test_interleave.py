"""Interleaved weights hold the same numbers in another order and give the same bits."""

from __future__ import annotations

import dataclasses
import operator
from functools import partial
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.loading import read
from pallas_kernels import cpu
from pallas_kernels.cpu.native import instruction_sets
from pallas_kernels.formats import Bfloat16Weight, Int4Weight, Quantized
from pallas_kernels.interleave import TILE, by_rows, interleave, is_interleaved
from pallas_kernels.matmul import matmul
from pallas_kernels.weights import Weight
from specjax.evaluation.digests import digest
from specjax.model.params import Params, stored
from tests.support.compiled import dequantize, take_rows
from tests.support.covering import representatives
from tests.support.random_weights import FORMATS, SOME, random_rows, random_weight

# Plain arrays stay row by row, and bfloat12 has one order.
ORDERED = tuple(name for name in FORMATS if name not in ("float32", "bfloat12"))
formats = pytest.mark.parametrize("name", representatives(ORDERED, *SOME))
needs_library = pytest.mark.skipif(not cpu.available(), reason="the C++ library was not built")


def assert_equal(a: object, b: object) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", representatives(ORDERED, "int4-32-zeros", "bfloat16"))
def test_there_and_back(name: str) -> None:
    for n, k in ((1, 2), (16, 256), (37, 300)):
        weight = random_weight(name, n, k)
        changed = interleave(weight)
        assert is_interleaved(changed) and not is_interleaved(weight)
        assert changed.shape == weight.shape == (n, k)
        assert changed.nbytes <= weight.nbytes / n * -(-n // TILE) * TILE
        assert_equal(by_rows(changed), weight)
        assert_equal(jax.jit(by_rows)(changed), weight)
        assert_equal(jax.jit(interleave)(weight), changed)
        assert_equal(interleave(changed), changed)
        np.testing.assert_array_equal(dequantize(changed), dequantize(weight))


def test_where_a_number_goes() -> None:
    n, k = 20, 6
    bits = np.arange(n * k, dtype=np.uint16).reshape(n, k)
    weight = cast(Bfloat16Weight, interleave(Bfloat16Weight(jnp.asarray(bits))))
    found = np.asarray(weight.bits)
    assert found.shape == (2, 3, 32)
    for row in range(n):
        for column in range(k):
            word, half = divmod(column, 2)
            assert found[row // TILE, word, row % TILE * 2 + half] == bits[row, column]
    assert not found[1, :, 2 * (n - TILE) :].any()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_are_looked_up(name: str) -> None:
    weight, wanted = random_weight(name, 37, 300), jnp.asarray([[0, 36, 5], [16, 15, 5]])
    for each in (weight, interleave(weight)):
        np.testing.assert_array_equal(take_rows(each, wanted), dequantize(weight)[wanted])


def test_an_odd_number_of_inputs_stays() -> None:
    weight = random_weight("bfloat16", 5, 7)
    assert interleave(weight) is weight


@formats
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.covering(1)
def test_kernels_give_the_same_bits(name: str, instruction_set: str) -> None:
    """Tests few rows, which are multiplied during decoding in one or two portions, and many.

    Three shapes, because each is made and interleaved anew: less than a tile, whole ones, and more
    than one block of inputs with tails of both kinds.
    """
    for m, n, k in (
        (1, 70, 1100),
        (2, 160, 512),
        (3, 7, 130),
        (4, 70, 1100),
        (7, 70, 1100),
        (8, 7, 130),
        (12, 160, 512),
        (19, 7, 130),
        (33, 70, 1100),
    ):
        weight = random_weight(name, n, k)
        if isinstance(weight, Int4Weight) and weight.outliers is not None:
            continue  # only `matmul` splits them, as tested below
        rows = [random_rows(m, k, dtype) for dtype in ("bfloat16", "float32")]
        activations = ("a16", "a8", "a4") if isinstance(weight, Quantized) else ("a16",)
        one, other = _products((weight, interleave(weight)), rows, activations, instruction_set)
        jax.tree.map(np.testing.assert_array_equal, one, other)


@partial(jax.jit, static_argnums=(2, 3))
def _products(
    weights: tuple[Weight, ...],
    rows: list[jax.Array],
    activations: tuple[str, ...],
    instruction_set: str,
) -> list[list[jax.Array]]:
    """All products of the weights and rows, in one program, because compiling takes most time."""
    return [
        [
            cpu.matmul(x, (weight,), activation=activation, instruction_set=instruction_set)[0]
            for x in rows
            for activation in activations
        ]
        for weight in weights
    ]


@formats
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.covering(1)
def test_the_door_takes_them(name: str, implementation: str | None) -> None:
    weight, x = random_weight(name, 37, 300), random_rows(3, 300)
    if isinstance(weight, Int4Weight):
        order = jnp.asarray(np.random.default_rng(0).permutation(300), jnp.int32)
        weight = dataclasses.replace(weight, order=order, activation_clip=0.9)
    for activation in ("a16", "a4") if isinstance(weight, Quantized) else ("a16",):
        one, other = (
            matmul(x, each, activation, implementation=implementation)
            for each in (weight, interleave(weight))
        )
        np.testing.assert_array_equal(one, other)


def is_prepacked(params: Params) -> bool:
    return is_interleaved(params.head.weight) or is_interleaved(params.layers[0].q.weight)


@pytest.mark.exhaustive
@needs_library
def test_models_come_prepacked(tmp_path: Path) -> None:
    params = specjax.load("tiny")
    rows = read("tiny")
    assert is_prepacked(params) and not is_prepacked(rows)
    assert_equal(stored(params), rows)
    assert all(map(operator.is_, *map(jax.tree.leaves, (specjax.prepack(params), params))))
    assert digest(params) == digest(rows)
    specjax.save(params, tmp_path / "saved")
    assert_equal(read(tmp_path / "saved"), rows)
    prompt = jnp.arange(1, 9, dtype=jnp.int32)
    drafter = specjax.QSpec(3)
    one, other = (
        specjax.decode(each, prompt, drafter=drafter, max_new_tokens=24) for each in (params, rows)
    )
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.stats.accepted, other.stats.accepted)


@needs_library
@pytest.mark.exhaustive
def test_what_is_made_of_a_prepacked_model(tmp_path: Path) -> None:
    rows = read("tiny-16bit")
    params = specjax.prepack(rows)
    assert is_prepacked(params)
    for method, head in (("rtn", False), ("mxfp4", True)):
        quantized = specjax.quantize(params, method, lm_head=head)
        assert is_prepacked(quantized)
        assert_equal(stored(quantized), stored(specjax.quantize(rows, method, lm_head=head)))
        specjax.export(quantized, tmp_path / method)
        specjax.export(stored(quantized), tmp_path / f"{method}-rows")
        one, other = (
            (tmp_path / name / "model.safetensors").read_bytes()
            for name in (method, f"{method}-rows")
        )
        assert one == other
    mesh = specjax.parallel.mesh(data=1, tensor=1)
    assert_equal(specjax.parallel.shard(params, mesh), specjax.parallel.shard(rows, mesh))
