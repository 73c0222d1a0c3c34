"""Decoder layers on NVIDIA GPUs in few launches.

A decode step of a small batch spends its time on launches, not on bytes. A kernel between two
products adds the segments that the first leaves apart, computes what the model asks for, and stores
the result as the second reads it. The bits are those of the operations one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_gpu, triton_gpu
from pallas_kernels.activations import Activation
from pallas_kernels.attention import IMPLEMENTATIONS as ATTENTION
from pallas_kernels.cache_entries import Unquantized
from pallas_kernels.layers import Layers
from pallas_kernels.matmul import has_kernel, in_rows, on_hopper
from pallas_kernels.stacks import Stacked
from pallas_kernels.triton_gpu.gate import gated
from pallas_kernels.triton_gpu.norms import add_and_norm
from pallas_kernels.triton_gpu.readings import Operand, Reading, read
from pallas_kernels.triton_gpu.segments import Sums
from pallas_kernels.weights import Weight

Cached = tuple[Unquantized, Unquantized]
NARROWEST = 129  # features of x; a norm of fewer would be summed over another width in one kernel


@dataclasses.dataclass(frozen=True)
class _Product:
    """The products of one x and some matrices of a layer.

    stacks: the matrices of all layers.
    activations: the precision of each.
    m: rows of x.
    interpret: runs the kernels as ordinary XLA operations.
    """

    stacks: tuple[Weight, ...]
    activations: tuple[Activation, ...]
    m: int
    interpret: bool

    def of_layer(self, number: jax.Array) -> tuple[Stacked, ...]:
        """Returns the matrices of one layer."""
        return tuple(Stacked(stack, number) for stack in self.stacks)

    def readings(self) -> set[Reading]:
        """How the matrices read x, each at its own precision."""
        weights = self.of_layer(jnp.int32(0))
        reading = mosaic_gpu.reading if on_hopper(weights) else triton_gpu.reading
        pairs = zip(weights, self.activations, strict=True)
        return {reading(self.m, weight, activation) for weight, activation in pairs}

    @property
    def reading(self) -> Reading:
        """How all matrices read x: at one precision, therefore."""
        [reading] = self.readings()
        return reading

    def __call__(self, number: jax.Array, operand: Operand) -> tuple[Sums, ...]:
        """Multiplies x, in the form of `reading`, by the matrices of one layer."""
        weights, activation = self.of_layer(number), self.reading.activation
        if on_hopper(weights):
            return mosaic_gpu.sums(operand, weights, activation, self.m, interpret=self.interpret)
        return triton_gpu.sums(operand, weights, activation, interpret=self.interpret)


def _products(weights: Layers, m: int, interpret: bool = False) -> list[_Product]:
    """A layer's four: of queries, keys and values; of attention's result; of gate and up; down."""
    stacks, activations = tuple(weights.linears), tuple(weights.activations)
    parts = slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)
    return [_Product(stacks[part], activations[part], m, interpret) for part in parts]


def layers_refusal(
    x: jax.Array, keys: jax.Array, ancestors: jax.Array | None, weights: Layers
) -> str | None:
    """Returns why `layers` does not serve these operands; None if it does."""
    (b, t, d), e = x.shape, keys.shape[-1]
    if x.size == 0 or d < NARROWEST:
        return f"x must have rows of {NARROWEST} features or more, got {list(x.shape)}"
    if weights.q_norm is not None or any(bias is not None for bias in weights.biases):
        return "layers must have no biases and no norms of heads, got some"
    if not all(has_kernel("cuda", each, x) and in_rows(each) for each in weights.linears):
        return "a weight has a form that no kernel reads"
    if any(len(product.readings()) > 1 for product in _products(weights, b * t)):
        return "weights that read the same x must read it alike"
    heads = Stacked(weights.linears[0], jnp.int32(0)).shape[0] // e
    queries: Any = jax.ShapeDtypeStruct((b, t, heads, e), x.dtype)
    return triton_gpu.attention_refusal(queries, keys, ancestors)


def layers(
    x: jax.Array,
    keys: Unquantized,
    values: Unquantized,
    lengths: jax.Array,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    ancestors: jax.Array | None,
    weights: Layers,
    *,
    numbers: Sequence[int],
    windows: Sequence[int | None],
    sinks: Sequence[int],
    eps: float,
    head_scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, Unquantized, Unquantized]:
    """Runs decoder layers that `layers_refusal` accepts.

    Arguments and results are those of `cpu.layers`.

    Args:
      windows, sinks: the same for every layer, as in all models whose layers are stacked.
      interpret: runs the kernels as ordinary XLA operations, on any platform.

    Raises:
      ValueError: windows or sinks differ.
    """
    if len({*zip(windows, sinks, strict=True)}) > 1:
        raise ValueError(f"layers must see alike, got windows {windows} and sinks {sinks}")
    b, t, d = x.shape
    products = _products(weights, b * t, interpret)
    attention = {"window": windows[0], "sinks": sinks[0], "head_scale": head_scale}
    run = _Pass(products, weights, lengths, positions, rope, ancestors, attention, eps, interpret)
    flat, norms = x.reshape(b * t, d), weights.attention_norm
    first = Stacked(norms, jnp.int32(numbers[0]))
    normed = triton_gpu.rms_norm(flat, first, eps, x.dtype, interpret=interpret)
    carry: Carry = flat, read(normed, products[0].reading, interpret=interpret), (keys, values)
    begin, end = numbers[0], numbers[-1] + 1
    if tuple(numbers) == tuple(range(begin, end)):  # to look a number up is a launch

        def turn(number: jax.Array, carry: Carry) -> Carry:
            return run.layer(number, Stacked(norms, number), 1, carry)

        carry = lax.fori_loop(begin, end, turn, carry)
    else:
        pairs = jnp.array([numbers, [*numbers[1:], numbers[-1]]], jnp.int32).T

        def looked_up(carry: Carry, pair: jax.Array) -> tuple[Carry, None]:
            return run.layer(pair[0], Stacked(norms, pair[1]), 0, carry), None

        carry = lax.scan(looked_up, carry, pairs)[0]
    flat, _, (keys, values) = carry
    return flat.reshape(b, t, d), keys, values


# The residual stream, bf16[M, D]; its norm as the first product reads it; the cache.
Carry = tuple[jax.Array, Operand, Cached]


@dataclasses.dataclass(frozen=True)
class _Pass:
    """What all layers of a pass share. The fields are arguments of `layers`.

    products: see `_products`.
    attention: the window, the sinks and the scale of scores.
    """

    products: list[_Product]
    weights: Layers
    lengths: jax.Array
    positions: jax.Array
    rope: tuple[jax.Array, jax.Array]
    ancestors: jax.Array | None
    attention: dict[str, Any]
    eps: float
    interpret: bool

    def layer(self, number: jax.Array, following: Stacked, ahead: int, carry: Carry) -> Carry:
        """Runs a layer, and takes the norm for the next one.

        following, ahead: the scale of that norm (`norms.add_and_norm`).
        """
        (x, operand, cached), (qkv, o, gate_up, down) = carry, self.products
        mixed, cached = self._attended(number, qkv(number, operand), cached)
        [update] = o(number, mixed)
        own = Stacked(self.weights.mlp_norm, number)
        x, operand = add_and_norm(
            x, update, own, self.eps, gate_up.reading, interpret=self.interpret
        )
        gate, up = gate_up(number, operand)
        hidden = gated(gate, up, down.m, down.reading, interpret=self.interpret)
        [update] = down(number, hidden)
        x, operand = add_and_norm(
            x, update, following, self.eps, qkv.reading, ahead=ahead, interpret=self.interpret
        )
        return x, operand, cached

    def _attended(
        self, number: jax.Array, new: Sequence[Sums], cached: Cached
    ) -> tuple[Operand, Cached]:
        """Attention's result as the next product reads it, and the cache with the new entries."""
        o = self.products[1]
        queries, cached = triton_gpu.rotate_and_write_sums(
            new, self.rope, cached, self.lengths, number, interpret=self.interpret
        )
        width = queries.shape[2] * queries.shape[3]
        direct = o.reading.activation == "a16" and o.reading.width == width
        mixed = ATTENTION["triton_gpu"](
            queries, *cached, self.lengths, self.positions, self.ancestors, number,
            reading=o.reading if direct else Reading("a16", width, o.m),
            interpret=self.interpret, **self.attention,
        )  # fmt: skip
        operand = (mixed,) if direct else read(mixed, o.reading, interpret=self.interpret)
        return operand, cached
