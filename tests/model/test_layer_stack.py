"""Layers in one stack, which one call of the C++ library runs: the same bits as one by one, in a
program that does not grow with them."""

from __future__ import annotations

import dataclasses
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from pallas_kernels import cpu
from pallas_kernels.matmul import matmul
from pallas_kernels.stacks import Stacked
from pallas_kernels.weights import has_cheap_reading
from specjax.model.kv_cache import KVCache
from specjax.model.layers import LINEARS, Layer, LayerStack, Linear, _empty
from specjax.model.params import Params, stack_layers, unstack_layers
from specjax.model.transformer import forward
from specjax.speculation import trees
from tests.support.covering import left_out, representatives
from tests.support.random_models import CONFIG, quantized_model, random_model, random_prompts

pytestmark = pytest.mark.skipif(not cpu.available(), reason="without it no layers are stacked")

DEEP = dataclasses.replace(CONFIG, num_layers=5, dtype="bfloat16")
WINDOW = dataclasses.replace(DEEP, sliding_window=3)
QWEN = dataclasses.replace(DEEP, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
NARROW = dataclasses.replace(DEEP, intermediate_size=8)  # between the products of an MLP
FORMS = {
    "4 bits": lambda: quantized_model(DEEP),
    "4 bits, float32": lambda: quantized_model(dataclasses.replace(DEEP, dtype="float32")),
    "8 bits": lambda: specjax.quantize(random_model(DEEP), "int8"),
    "MXFP4": lambda: specjax.quantize(random_model(DEEP), "mxfp4"),
    "nested16": lambda: specjax.quantize(random_model(DEEP), "nested16"),
    "nested8": lambda: specjax.quantize(random_model(DEEP), "nested8"),
    "bfloat16": lambda: specjax.prepack(random_model(DEEP)),
    "float32": lambda: specjax.prepack(random_model(dataclasses.replace(DEEP, dtype="float32"))),
    "a window": lambda: quantized_model(WINDOW),
    "a narrow MLP": lambda: specjax.prepack(random_model(NARROW)),
    "biases and norms of heads": lambda: specjax.prepack(with_biases(random_model(QWEN))),
    "16-bit values beside 4-bit ones": lambda: specjax.prepack(with_plain(quantized_model(DEEP))),
}
TREE = jnp.array([[-1, 0, 0, 1, 2, 4, 4], [-1, -1, 1, 1, 0, 4, 2]])


def with_biases(params: Params) -> Params:
    """The model with a bias for every linear layer, and norms of queries and keys."""
    rng = np.random.default_rng(1)

    def values(size: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 1.5, size), jnp.bfloat16)

    def changed(layer: Layer) -> Layer:
        linears = {name: getattr(layer, name) for name in LINEARS}
        linears = {k: Linear(v.weight, values(v.weight.shape[0])) for k, v in linears.items()}
        norms = {name: values(QWEN.head_dim) for name in ("q_norm", "k_norm")}
        return dataclasses.replace(layer, **linears, **norms)

    return dataclasses.replace(params, layers=tuple(map(changed, params.layers)))


def with_plain(params: Params) -> Params:
    """The model whose values are multiplied by 16-bit weights, beside 4-bit queries and keys."""
    apart, plain = unstack_layers(params), random_model(DEEP)
    layers = zip(apart.layers, plain.layers, strict=True)
    changed = tuple(dataclasses.replace(one, v=other.v) for one, other in layers)
    return dataclasses.replace(apart, layers=changed)


def passes(
    params: Params, activation: str, tree: bool, window: int | None = None
) -> tuple[np.ndarray, KVCache]:
    """The logits and the cache after a context of a few tokens and seven more, some of which no
    longer fit into one row's cache."""
    run = jax.jit(forward, static_argnames="activation")
    tokens = jnp.array(random_prompts((9, 9), 96))
    cache = KVCache.create(params.config, 2, 16)
    _, cache = run(params, tokens, jnp.arange(9) + jnp.zeros((2, 1), jnp.int32), cache)
    cache = cache.with_lengths(jnp.array([6, cache.capacity - 4])).with_window(window)
    ancestors = trees.ancestors(TREE) if tree else None
    depths = jnp.arange(7) if ancestors is None else trees.depths(ancestors)
    positions = cache.lengths[:, None] + depths
    return run(params, tokens[:, :7], positions, cache, ancestors, activation=activation)


@pytest.mark.parametrize("form", representatives(FORMS, "4 bits", "bfloat16", "nested16"))
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_the_bits_are_those_of_layers_one_by_one(form: str, tree: bool) -> None:
    params = FORMS[form]()
    assert isinstance(params.layers, LayerStack) and len(params.layers) == 5
    apart = unstack_layers(params)
    assert not isinstance(apart.layers, LayerStack)
    cheap = any(has_cheap_reading(linear(params, name).weight) for name in LINEARS)
    for activation, window in [("a16", None), ("a16", 2), *[("a8", None)] * cheap]:
        one, other = (passes(each, activation, tree, window) for each in (params, apart))
        assert np.isfinite(one[0][0]).all()
        jax.tree.map(np.testing.assert_array_equal, one, other)


def linear(params: Params, name: str) -> Linear:
    return getattr(params.layers.arrays, name)


def logits(params: Params, layers: tuple[int, ...] | None = None) -> np.ndarray:
    tokens = jnp.array(random_prompts((7, 7), 96))
    positions = jnp.broadcast_to(jnp.arange(7), tokens.shape)
    cache = KVCache.create(params.config, 2, 16)
    run = jax.jit(forward, static_argnames=("activation", "layers"))
    return np.asarray(run(params, tokens, positions, cache, layers=layers)[0])


def test_layers_are_run_in_the_order_that_is_asked_for() -> None:
    params = FORMS["4 bits"]()
    apart = unstack_layers(params)
    for layers in (None, (0, 3, 4), (4, 0, 0), ()):
        np.testing.assert_array_equal(logits(params, layers), logits(apart, layers))


@pytest.mark.parametrize("batched", ["rows", "cache", "weights"])
def test_under_vmap(batched: str) -> None:
    """A batch of anything gives what its entries give alone."""
    params = FORMS["bfloat16"]()
    other = specjax.prepack(random_model(DEEP, seed=1))
    tokens = jnp.array(random_prompts((3, 3), 96))[:, None]
    caches = [
        KVCache.create(DEEP, 1, 16).with_lengths(jnp.array([length], jnp.int32))
        for length in (0, 2)
    ]

    def run(params: Params, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        return forward(params, tokens, cache.lengths[:, None] + jnp.arange(3), cache)

    alone = {
        "rows": [(params, row, caches[0]) for row in tokens],
        "cache": [(params, tokens[0], cache) for cache in caches],
        "weights": [(each, tokens[0], caches[0]) for each in (params, other)],
    }[batched]
    axes = tuple(0 if name == batched else None for name in ("weights", "rows", "cache"))
    together = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *values) if axis == 0 else values[0]
        for values, axis in zip(zip(*alone, strict=True), axes, strict=True)
    ]
    whole = jax.jit(jax.vmap(run, in_axes=axes))(*together)
    for index, operands in enumerate(alone):
        entry = jax.tree.map(itemgetter(index), whole)
        jax.tree.map(np.testing.assert_array_equal, entry, jax.jit(run)(*operands))


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


def test_gpus_read_stacks_of_fewer_than_2_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    params = unstack_layers(quantized_model(DEEP))
    huge = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2**29,), leaf.dtype), params.layers)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert isinstance(stack_layers(params).layers, LayerStack)
    large = dataclasses.replace(params, layers=huge)
    assert stack_layers(large) is large
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert stack_layers(params) is params
