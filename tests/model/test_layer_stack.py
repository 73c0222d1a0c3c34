"""Layers in one stack: the same bits as one by one, in a program that does not grow with them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from pallas_kernels import cpu
from pallas_kernels.matmul import matmul
from pallas_kernels.stacks import Stacked
from specjax.model.kv_cache import KVCache
from specjax.model.layers import LayerStack, _empty
from specjax.model.params import Params, unstack_layers
from specjax.model.transformer import forward
from tests.support.covering import left_out, representatives
from tests.support.random_models import CONFIG, quantized_model, random_model, random_prompts

pytestmark = pytest.mark.skipif(not cpu.available(), reason="without it no layers are stacked")

DEEP = dataclasses.replace(CONFIG, num_layers=5, dtype="bfloat16")
FORMS = {
    "4 bits": lambda: quantized_model(DEEP),
    "8 bits": lambda: specjax.quantize(random_model(DEEP), "int8"),
    "MXFP4": lambda: specjax.quantize(random_model(DEEP), "mxfp4"),
    "bfloat16": lambda: specjax.prepack(random_model(DEEP)),
    "float32": lambda: specjax.prepack(random_model(dataclasses.replace(DEEP, dtype="float32"))),
}


def logits(params: Params, layers: tuple[int, ...] | None = None) -> np.ndarray:
    tokens = jnp.array(random_prompts((7, 7), 96))
    positions = jnp.broadcast_to(jnp.arange(7), tokens.shape)
    cache = KVCache.create(params.config, 2, 16)
    run = jax.jit(forward, static_argnames=("activation", "layers"))
    return np.asarray(run(params, tokens, positions, cache, layers=layers)[0])


@pytest.mark.parametrize("form", representatives(FORMS, "4 bits", "bfloat16"))
def test_the_bits_are_those_of_layers_one_by_one(form: str) -> None:
    params = FORMS[form]()
    assert isinstance(params.layers, LayerStack) and len(params.layers) == 5
    apart = unstack_layers(params)
    assert not isinstance(apart.layers, LayerStack)
    for layers in (None, (0, 3, 4), ()):
        np.testing.assert_array_equal(logits(params, layers), logits(apart, layers))


@pytest.mark.parametrize("drafter", [specjax.QSpec(2), left_out(specjax.LayerSkip((0, 2, 4), 2))])
def test_drafters_write_the_same_text_from_a_stack(drafter: specjax.Drafter) -> None:
    params = FORMS["4 bits"]()
    prompts = random_prompts((9, 4), 96)
    one, other = (
        specjax.decode(each, prompts, drafter=drafter, max_new_tokens=12)
        for each in (params, unstack_layers(params))
    )
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.stats.accepted, other.stats.accepted)


def test_programs_do_not_grow_with_the_layers() -> None:
    def lines(layers: int) -> int:
        params = quantized_model(dataclasses.replace(DEEP, num_layers=layers))
        cache = KVCache.create(params.config, 1, 16)
        tokens = jnp.ones((1, 3), jnp.int32)
        lowered = jax.jit(forward).lower(params, tokens, jnp.arange(3)[None], cache)
        return len(lowered.as_text().splitlines())

    assert lines(3) == lines(9)


@pytest.mark.exhaustive
def test_layers_of_several_forms_stay_apart() -> None:
    """One layer in 16 bits, an outlier, or a window in some layers: nothing is stacked."""
    params = unstack_layers(quantized_model(DEEP))
    plain = unstack_layers(FORMS["bfloat16"]())
    mixed = dataclasses.replace(params, layers=(*params.layers[:4], plain.layers[4]))
    windows = dataclasses.replace(DEEP, sliding_window=3, sliding_layers=(1,))
    calibration = np.arange(64).reshape(2, 32) % 96
    outliers = specjax.quantize(random_model(DEEP), "atom", calibration=calibration)
    for model in (mixed, dataclasses.replace(params, config=windows), outliers):
        model = specjax.prepack(model)
        assert not isinstance(model.layers, LayerStack)
        assert np.isfinite(logits(model)).all()


def test_layers_can_be_read_from_a_stack() -> None:
    params = FORMS["4 bits"]()
    layers = unstack_layers(params).layers
    assert len(list(params.layers)) == len(params.layers) == 5
    for index in (0, 4, -1):
        jax.tree.map(np.testing.assert_array_equal, params.layers[index], layers[index])
    jax.tree.map(np.testing.assert_array_equal, params.layers[-2:], layers[-2:])
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"must be in 0 … 4, got {index}"):
            params.layers[index]


@pytest.mark.parametrize("implementation", [None, "reference", "cpu"])
def test_products_with_a_matrix_of_a_stack(implementation) -> None:
    """Also where the weights of a call are of several stacks, or some of them of none."""
    layers = FORMS["4 bits"]().layers
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)
    two = jnp.int32(2)
    q, k = (Stacked(getattr(layers.arrays, name).weight, two) for name in "qk")
    v = Stacked(layers.arrays.v.weight, jnp.int32(1))
    apart = tuple(getattr(layers[i], n).weight for n, i in (("q", 2), ("k", 2), ("v", 1)))
    for weights in ((q, k), (q, k, v), (q, apart[1])):
        got = matmul(x, weights, implementation=implementation)
        expected = matmul(x, apart[: len(weights)], implementation=implementation)
        jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_jax_takes_a_stack_over_without_a_copy() -> None:
    whole = _empty((5, 3, 7), np.dtype(jnp.bfloat16))
    assert jax.device_put(whole).unsafe_buffer_pointer() == whole.ctypes.data
