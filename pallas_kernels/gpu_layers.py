"""Decoder layers on NVIDIA GPUs in few launches.

A decode step of a small batch spends its time on launches, not on bytes. A kernel between two
products adds the segments that the first leaves apart, computes what the model asks for, and stores
the result as the second reads it. The bits are those of the operations one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu, triton_gpu
from pallas_kernels.activations import Activation
from pallas_kernels.attention import IMPLEMENTATIONS as ATTENTION
from pallas_kernels.cache_entries import Unquantized
from pallas_kernels.formats import padded_inputs
from pallas_kernels.layers import Layers
from pallas_kernels.matmul import has_kernel, in_rows, on_hopper
from pallas_kernels.stacks import Stacked
from pallas_kernels.triton_gpu.gate import gated
from pallas_kernels.triton_gpu.norms import add_and_norm
from pallas_kernels.triton_gpu.readings import Operand, Reading, read
from pallas_kernels.triton_gpu.segments import Sums
from pallas_kernels.weights import Weight

Cached = tuple[Unquantized, Unquantized]


@dataclasses.dataclass(frozen=True)
class _Product:
    """The products of one x and the matrices of a layer, for M rows of x.

    stacks: of all layers.
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
        """How all matrices read x."""
        [reading] = self.readings()
        return reading

    def __call__(self, number: jax.Array, operand: Operand) -> tuple[Sums, ...]:
        """Multiplies x, in the form of `reading`, by the matrices of one layer."""
        weights, activation = self.of_layer(number), self.activations[0]
        if on_hopper(weights):
            return mosaic_gpu.sums(operand, weights, activation, self.m, interpret=self.interpret)
        return triton_gpu.sums(operand, weights, activation, interpret=self.interpret)


def _products(weights: Layers, m: int, interpret: bool) -> list[_Product]:
    """Those of the queries, keys and values, of attention, of gate and up, and of the hidden x."""
    stacks, activations = tuple(weights.linears), tuple(weights.activations)
    parts = slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)
    return [_Product(stacks[part], activations[part], m, interpret) for part in parts]


def layers_refusal(
    x: jax.Array, keys: jax.Array, ancestors: jax.Array | None, weights: Layers
) -> str | None:
    """Returns why `layers` does not serve these operands; None if it does. Layers see alike."""
    (b, t, d), e = x.shape, keys.shape[-1]
    if x.dtype != jnp.bfloat16 or keys.dtype != jnp.uint16:
        return f"x and the cache must be bfloat16, got {x.dtype.name} and {keys.dtype.name}"
    if weights.q_norm is not None or any(bias is not None for bias in weights.biases):
        return "layers must have no biases and no norms of heads, got some"
    if e & e - 1 or pl.next_power_of_2(d) < padded_inputs(d):
        return f"heads must have 2^n features and x more than 128, got {e} and {d}"
    if not all(has_kernel("cuda", each, x) and in_rows(each) for each in weights.linears):
        return "a weight has a form that no kernel reads"
    for product in _products(weights, 1, False):
        minima = any(getattr(stack, "minima", None) is not None for stack in product.stacks)
        if minima or len(product.readings()) > 1:
            return "weights that read the same x must read it alike and have no minima"
    outputs = Stacked(weights.linears[0], jnp.int32(0)).shape[0]
    queries: Any = jax.ShapeDtypeStruct((b, t, outputs // e, e), x.dtype)
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
    """Runs decoder layers that `layers_refusal` accepts. Arguments as in `cpu.layers`.

    Args:
      interpret: runs the kernels as ordinary XLA operations, on any platform.
    """
    b, t, d = x.shape
    qkv, o, gate_up, down = _products(weights, b * t, interpret)
    quick = partial(add_and_norm, eps=eps, interpret=interpret)

    def attended(number: jax.Array, new: Sequence[Sums], cached: Cached) -> tuple[Operand, Cached]:
        queries, cached = triton_gpu.rotate_and_write_sums(
            new, rope, cached, lengths, number, interpret=interpret
        )
        width = queries.shape[2] * queries.shape[3]
        stored = (
            o.reading
            if o.reading.width == width and o.reading.activation == "a16"
            else Reading("a16", width, b * t)
        )
        mixed = ATTENTION["triton_gpu"](
            queries, *cached, lengths, positions, ancestors, number, window=windows[0],
            sinks=sinks[0], head_scale=head_scale, reading=stored, interpret=interpret,
        )  # fmt: skip
        same = stored == o.reading
        return (mixed,) if same else read(mixed, o.reading, interpret=interpret), cached

    def layer(number: jax.Array, following: Stacked, ahead: int, carry: Any) -> Any:
        x, operand, cached = carry
        mixed, cached = attended(number, qkv(number, operand), cached)
        [update] = o(number, mixed)
        x, operand = quick(x, update, Stacked(weights.mlp_norm, number), reading=gate_up.reading)
        gate, up = gate_up(number, operand)
        hidden = gated(gate, up, b * t, down.reading, interpret=interpret)
        [update] = down(number, hidden)
        x, operand = quick(x, update, following, reading=qkv.reading, ahead=ahead)
        return x, operand, cached

    flat, norms = x.reshape(b * t, d), weights.attention_norm
    first = Stacked(norms, jnp.int32(numbers[0]))
    normed = triton_gpu.rms_norm(flat, first, eps, x.dtype, interpret=interpret)
    carry: Any = flat, read(normed, qkv.reading, interpret=interpret), (keys, values)
    begin, end = numbers[0], numbers[-1] + 1
    if tuple(numbers) == tuple(range(begin, end)):  # to look a number up is a launch

        def turn(number: jax.Array, carry: Any) -> Any:
            return layer(number, Stacked(norms, number), 1, carry)

        carry = lax.fori_loop(begin, end, turn, carry)
    else:
        pairs = jnp.array([numbers, [*numbers[1:], numbers[-1]]], jnp.int32).T

        def looked_up(carry: Any, pair: jax.Array) -> tuple[Any, None]:
            return layer(pair[0], Stacked(norms, pair[1]), 0, carry), None

        carry = lax.scan(looked_up, carry, pairs)[0]
    flat, _, (keys, values) = carry
    return flat.reshape(b, t, d), keys, values
