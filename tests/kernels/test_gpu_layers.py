"""Layers that GPUs run in few launches have the bits of the operations one by one."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from pallas_kernels import gpu_layers, triton_gpu
from pallas_kernels.attention import IMPLEMENTATIONS
from pallas_kernels.formats import Int4Weight
from pallas_kernels.interleave import by_rows
from pallas_kernels.layers import Layers
from pallas_kernels.rounding import round_to
from pallas_kernels.stacks import Stacked
from pallas_kernels.triton_gpu.gate import gated
from pallas_kernels.triton_gpu.norms import add_and_norm
from pallas_kernels.triton_gpu.readings import Reading, read
from pallas_kernels.triton_gpu.segments import Sums
from specjax.model.kv_cache import KVCache
from specjax.model.layers import LayerStack
from specjax.model.params import Params, stack_layers
from specjax.model.transformer import _run_layers, layer_weights, pass_context
from tests.kernels.test_mosaic_gpu import lowered
from tests.support.covering import left_out
from tests.support.random_models import CONFIG, quantized_model, random_model

WIDE = dataclasses.replace(
    CONFIG, num_layers=3, dtype="bfloat16", hidden_size=192, intermediate_size=320, head_dim=32
)
FORMS = {
    "bfloat16": lambda: random_model(WIDE),
    "4 bits": lambda: quantized_model(WIDE),
    "MXFP4": lambda: specjax.quantize(random_model(WIDE), "mxfp4"),
    "nested16": lambda: specjax.quantize(random_model(WIDE), "nested16"),
    "nested8": lambda: specjax.quantize(random_model(WIDE), "nested8"),
    "minima": lambda: quantized_model(WIDE),  # `with_minima`
}
CASES = [("bfloat16", "a16"), ("4 bits", "a8"), ("MXFP4", "a16"), ("nested16", "a16"),
         ("nested8", "a16"), ("minima", "a16"), ("minima", "a8")]  # fmt: skip


def with_minima(weight: Int4Weight) -> Int4Weight:
    """The weight with minima, as GGUF's have them, in place of zeros."""
    return dataclasses.replace(weight, zeros=None, minima=-8.5 * weight.scales)


def filled_cache(rows: int, slots: int) -> KVCache:
    """A cache of more rows than x has, or as many, whose contexts end near the last slot."""
    cache = KVCache.create(WIDE, rows, slots)
    values = np.random.default_rng(1).normal(size=(2, *cache.keys.shape))
    keys, values = jnp.asarray(values, jnp.bfloat16).view(jnp.uint16)
    lengths = jnp.array([slots - 20, 2], jnp.int32)
    return dataclasses.replace(cache, keys=keys, values=values, lengths=lengths)


@dataclasses.dataclass(frozen=True)
class Case:
    """A pass over new tokens, of a chain or a tree, and the weights as GPUs read them."""

    params: Params
    weights: Layers
    x: jax.Array
    cache: KVCache
    ancestors: jax.Array | None = None
    window: int | None = None

    @classmethod
    def make(cls, form: str, activation: str) -> Case:
        params = stack_layers(FORMS[form]())
        assert isinstance(params.layers, LayerStack)
        weights = layer_weights(params.layers, activation)
        numbers = range(WIDE.num_layers)
        linears = [
            jax.tree.map(
                lambda *each: jnp.stack(each),
                *[by_rows(Stacked(stack, jnp.int32(number)).taken()) for number in numbers],
            )
            for stack in weights.linears
        ]
        x = np.random.default_rng(0).normal(size=(2, 3, WIDE.hidden_size))
        linears = [with_minima(each) for each in linears] if form == "minima" else linears
        weights = weights._replace(linears=linears)
        return cls(params, weights, jnp.asarray(x, jnp.bfloat16), filled_cache(3, 128))

    @property
    def operands(self) -> tuple:
        cache, depths = self.cache, jnp.array([0, 1, 1 if self.ancestors is not None else 2])
        positions = cache.lengths[:, None] + depths
        rope = pass_context(WIDE, positions).rope
        return self.x, cache.keys, cache.values, cache.lengths, positions, rope, self.ancestors

    def together(
        self, numbers: tuple[int, ...], *operands: object, interpret: bool = True
    ) -> tuple:
        """`gpu_layers.layers`."""
        return gpu_layers.layers(
            *operands, self.weights, numbers=numbers, windows=[self.window] * len(numbers),
            sinks=[1] * len(numbers), eps=WIDE.rms_norm_eps, head_scale=WIDE.head_dim**-0.5,
            interpret=interpret,
        )  # fmt: skip

    def one_by_one(
        self, numbers, x, keys, values, lengths, positions, rope, ancestors
    ) -> tuple[jax.Array, ...]:
        """Every operation by a call of its own, interpreted."""
        eps, (b, t, _) = WIDE.rms_norm_eps, x.shape
        weights, triton = self.weights, partial(triton_gpu.products, interpret=True)
        norm = partial(triton_gpu.rms_norm, eps=eps, dtype=x.dtype, interpret=True)
        gate = partial(triton_gpu.swiglu, interpret=True)

        def linear(x: jax.Array, places: tuple[int, ...], number: jax.Array) -> list[jax.Array]:
            of_layer = [Stacked(weights.linears[place], number) for place in places]
            precision = weights.activations[places[0]]
            products = triton(x.reshape(b * t, -1), of_layer, precision)
            return [y.reshape(b, t, -1) for y in products]

        def add(x: jax.Array, y: jax.Array) -> jax.Array:
            return round_to(x.astype(jnp.float32) + y, x.dtype)

        for number in map(jnp.int32, numbers):
            h = norm(x, Stacked(weights.attention_norm, number))
            q, k, v = (y.reshape(b, t, -1, WIDE.head_dim) for y in linear(h, (0, 1, 2), number))
            q, (keys, values) = triton_gpu.rotate_and_write(
                q, k, v, rope, (keys, values), lengths, number, interpret=True
            )
            mixed = IMPLEMENTATIONS["triton_gpu"](
                q, keys, values, lengths, positions, ancestors, number,
                window=self.window, sinks=1, head_scale=WIDE.head_dim**-0.5, interpret=True,
            )  # fmt: skip
            mixed = round_to(mixed.reshape(b, t, -1), x.dtype)
            x = add(x, *linear(mixed, (3,), number))
            h = norm(x, Stacked(weights.mlp_norm, number))
            hidden = gate(*linear(h, (4, 5), number), x.dtype)
            x = add(x, *linear(hidden, (6,), number))
        return x, keys, values


@pytest.mark.parametrize(("form", "activation"), [CASES[0], CASES[1], *map(left_out, CASES[2:])])
def test_the_bits_are_those_of_the_operations(form: str, activation: str) -> None:
    same_bits(Case.make(form, activation), (0, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("numbers", [(2, 0), (0, 1, 2)])
def test_layers_in_any_order(numbers: tuple[int, ...]) -> None:
    """A tree in a window, whose context is in two of attention's segments, is run alike."""
    tree = jnp.array([[[-1, 0], [0, 1], [0, 2]]] * 2)
    case = Case.make("bfloat16", "a16")
    cache = filled_cache(2, 640)
    same_bits(dataclasses.replace(case, cache=cache, ancestors=tree, window=5), numbers)


@pytest.mark.parametrize(("form", "activation"), [CASES[0], left_out(CASES[1])])
def test_they_compute_what_the_model_does(form: str, activation: str) -> None:
    case = Case.make(form, activation)
    case = dataclasses.replace(case, cache=filled_cache(2, 128))
    found = jax.jit(partial(case.together, (0, 1)))(*case.operands)
    context = pass_context(WIDE, case.operands[4], None, activation)
    x, cache = jax.jit(lambda x, cache: _run_layers(case.params.layers, (0, 1), x, cache, context))(
        case.x, case.cache
    )
    values = [
        np.asarray(each).view(jnp.bfloat16).astype(np.float32)
        for each in (*found, x, cache.keys, cache.values)
    ]
    for one, other in zip(values[:3], values[3:], strict=True):
        np.testing.assert_allclose(one, other, atol=0.03 * np.abs(other).max(), rtol=0)


def same_bits(case: Case, numbers: tuple[int, ...]) -> None:
    assert refusal(case) is None
    found = jax.jit(partial(case.together, numbers))(*case.operands)
    expected = jax.jit(partial(case.one_by_one, numbers))(*case.operands)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(*(np.asarray(each).view(np.uint16) for each in (one, other)))
    assert not np.array_equal(found[1], case.cache.keys)


def refusal(case: Case) -> str | None:
    return gpu_layers.layers_refusal(case.x, case.cache.keys, case.ancestors, case.weights)


def test_the_others_run_one_by_one() -> None:
    case = Case.make("4 bits", "a16")
    weights, x = case.weights, case.x
    biased = weights._replace(biases=[jnp.zeros((3, 128)), *weights.biases[1:]])
    headed = weights._replace(q_norm=jnp.ones((3, 32)), k_norm=jnp.ones((3, 32)))
    finer = dataclasses.replace(weights.linears[1], group_size=32)
    mixed = weights._replace(
        linears=[weights.linears[0], finer, *weights.linears[2:]], activations=["a8"] * 7
    )
    cases = {
        "no biases": dataclasses.replace(case, weights=biased),
        "norms of heads": dataclasses.replace(case, weights=headed),
        "read it alike": dataclasses.replace(case, weights=mixed),
        "129 features": dataclasses.replace(case, x=x[:, :, :128]),
        "must be bfloat16": dataclasses.replace(case, x=x.astype(jnp.float32)),
    }
    for message, other in cases.items():
        assert message in str(refusal(other))
    with pytest.raises(ValueError, match="see alike"):
        gpu_layers.layers(
            *case.operands, weights, numbers=(0, 1), windows=[None, 3], sinks=[0, 0],
            eps=1e-5, head_scale=1.0,
        )  # fmt: skip


def test_stores_permute_as_reads_do() -> None:
    """Kernels store for Hopper what `read` makes of their plain result."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    own, plain = Reading("a16", 512, 8, padded=True, permuted=True), Reading("a16", 512, 3)
    x, update = floats(3, 512).astype(jnp.bfloat16), Sums(floats(2, 3, 576), 64, 512)
    scale = Stacked(floats(2, 512), jnp.int32(1))
    queries = floats(1, 3, 8, 64).astype(jnp.bfloat16)
    entries = jax.lax.bitcast_convert_type(
        floats(1, 1, 128, 2, 64).astype(jnp.bfloat16), jnp.uint16
    )
    zero = jnp.zeros(1, jnp.int32)
    stores = {
        "norm": lambda reading: add_and_norm(x, update, scale, 1e-5, reading, interpret=True)[1],
        "gate": lambda reading: gated(update, update, 3, reading, interpret=True),
        "attention": lambda reading: [
            IMPLEMENTATIONS["triton_gpu"](
                queries, entries, entries, zero, jnp.arange(3)[None], None, jnp.int32(0),
                window=None, head_scale=1.0, reading=reading, interpret=True,
            )
        ],
    }  # fmt: skip
    for store in stores.values():
        [found], [expected] = store(own), read(store(plain)[0], own)
        np.testing.assert_array_equal(found[:3], expected[:3])


def test_segments_are_added_from_left_to_right() -> None:
    """As where a product adds them itself, which it does for many rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 256)), jnp.bfloat16)
    apart = Sums(jnp.asarray(rng.normal(size=(5, 3, 256)), jnp.float32), 0, 256)
    added, scale = Sums(apart.total(3)[None], 0, 256), Stacked(jnp.ones((1, 256)), jnp.int32(0))
    backwards = Sums(apart.parts[::-1], 0, 256).total(3)
    assert not np.array_equal(apart.total(3), backwards)  # so that another order would show
    integers = Reading("a8", 256, 3)

    def computed(update: Sums) -> list[jax.Array]:
        normed = add_and_norm(x, update, scale, 1e-5, integers, interpret=True)
        return jax.tree.leaves((normed, gated(update, update, 3, integers, interpret=True)))

    jax.tree.map(np.testing.assert_array_equal, computed(apart), computed(added))


@pytest.mark.parametrize(
    ("form", "activation", "launches"), [("bfloat16", "a16", 9), ("4 bits", "a8", 10)]
)
def test_a_layer_takes_few_launches(form: str, activation: str, launches: int) -> None:
    """Four products, four kernels between them and attention; one more quantizes its result."""
    case = Case.make(form, activation)
    text = lowered(partial(case.together, (0, 1, 2), interpret=False), *case.operands)
    before = 1 if activation == "a16" else 2  # the first norm, and the first x
    assert text.count("custom_call @") == launches + before
