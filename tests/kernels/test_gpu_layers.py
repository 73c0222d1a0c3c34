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
from pallas_kernels.interleave import by_rows
from pallas_kernels.layers import Layers
from pallas_kernels.rounding import round_to
from pallas_kernels.stacks import Stacked
from specjax.model.kv_cache import KVCache
from specjax.model.layers import LayerStack
from specjax.model.params import Params, stack_layers
from specjax.model.transformer import _weights, pass_context
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
}
CASES = [("bfloat16", "a16"), ("4 bits", "a8"), ("MXFP4", "a16"), ("nested16", "a16"),
         ("nested16", "a8"), ("nested8", "a16")]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A pass over new tokens, of a chain or a tree, and the weights as GPUs read them."""

    params: Params
    weights: Layers
    x: jax.Array
    cache: KVCache
    ancestors: jax.Array | None

    @classmethod
    def make(cls, form: str, activation: str, tree: bool = False) -> Case:
        params = stack_layers(FORMS[form]())
        assert isinstance(params.layers, LayerStack)
        weights = _weights(params.layers, activation)
        numbers = range(WIDE.num_layers)
        linears = [
            jax.tree.map(
                lambda *each: jnp.stack(each),
                *[by_rows(Stacked(stack, jnp.int32(number)).taken()) for number in numbers],
            )
            for stack in weights.linears
        ]
        x = np.random.default_rng(0).normal(size=(2, 3, WIDE.hidden_size))
        cache = KVCache.create(WIDE, 2, 128).with_lengths(jnp.array([0, 2], jnp.int32))
        ancestors = jnp.array([[[-1, 0], [0, 1], [0, 2]]] * 2) if tree else None
        weights = weights._replace(linears=linears)
        return cls(params, weights, jnp.asarray(x, jnp.bfloat16), cache, ancestors)

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
        every = {"windows": [None] * len(numbers), "sinks": [0] * len(numbers)}
        return gpu_layers.layers(
            *operands, self.weights, numbers=numbers, **every, eps=WIDE.rms_norm_eps,
            head_scale=WIDE.head_dim**-0.5, interpret=interpret,
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
                window=None, head_scale=WIDE.head_dim**-0.5, interpret=True,
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
@pytest.mark.parametrize("numbers", [(2, 0), (1,), (0, 1, 2)])
def test_layers_in_any_order(numbers: tuple[int, ...]) -> None:
    same_bits(Case.make("bfloat16", "a16", tree=True), numbers)


def same_bits(case: Case, numbers: tuple[int, ...]) -> None:
    assert gpu_layers.layers_refusal(case.x, case.cache.keys, None, case.weights) is None
    found = jax.jit(partial(case.together, numbers))(*case.operands)
    expected = jax.jit(partial(case.one_by_one, numbers))(*case.operands)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(*(np.asarray(each).view(np.uint16) for each in (one, other)))
    assert not np.array_equal(found[1], case.cache.keys)


@pytest.mark.parametrize(
    ("form", "activation", "launches"), [("bfloat16", "a16", 9), ("4 bits", "a8", 10)]
)
def test_a_layer_takes_few_launches(form: str, activation: str, launches: int) -> None:
    """Four products, four kernels between them and attention; one more quantizes its result."""
    case = Case.make(form, activation)
    text = lowered(partial(case.together, (0, 1, 2), interpret=False), *case.operands)
    before = 1 if activation == "a16" else 2  # the first norm, and the first x
    assert text.count("custom_call @") == launches + before
