"""The layers of a model: one by one, or in a stack that one loop runs over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bfloat12 import Bfloat12Weight, with_room
from pallas_kernels.matmul import reads_all_alike
from pallas_kernels.stacks import Stacked
from pallas_kernels.weights import Weight

Carry = TypeVar("Carry")
_LINE = 64  # bytes of a cache line


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """y = x · weightᵀ + bias. weight: (N, K); bias: [N] or None."""

    weight: Weight
    bias: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """One transformer block. Norm scales are [D]; `q_norm`, `k_norm` are [E] (Qwen3) or None."""

    attention_norm: jax.Array
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    mlp_norm: jax.Array
    gate: Linear
    up: Linear
    down: Linear
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None


LINEARS = ("q", "k", "v", "o", "gate", "up", "down")  # the fields of Layer that are quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerStack:
    """The layers of a model, all of one form.

    Programs over a stack are compiled as fast for many layers as for few.

    arrays: a layer whose arrays have one more axis in front, [L, ...].
    count: L, the number of layers. Static.
    """

    arrays: Layer
    count: int = jax.tree.static()

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, index: int | slice) -> Layer | tuple[Layer, ...]:
        """Returns copies of layers, as a tuple of layers would."""
        if isinstance(index, slice):
            return tuple(self[number] for number in range(self.count)[index])
        if not -self.count <= index < self.count:
            raise IndexError(f"a layer's number must be in 0 … {self.count - 1}, got {index}")
        layer: Layer = _copied(self.arrays, index % self.count)
        return layer

    def __iter__(self) -> Iterator[Layer]:
        return (self[index] for index in range(self.count))

    def view(self, index: jax.Array) -> Layer:
        """Returns one layer whose arrays stay in the stack. index: int32[], may be traced."""

        def part(value: Any) -> Any:
            if not isinstance(value, Linear):
                return None if value is None else Stacked(value, index)
            weight: Any = Stacked(value.weight, index)
            return Linear(weight, None if value.bias is None else value.bias[index])

        fields = (field.name for field in dataclasses.fields(Layer))
        return Layer(**{name: part(getattr(self.arrays, name)) for name in fields})


@jax.jit  # one program, not two for every shape
def _copied(stack: Layer, index: int) -> Layer:
    copied: Layer = jax.tree.map(lambda leaf: leaf[index], stack)
    return copied


def over_layers(
    layers: tuple[Layer, ...] | LayerStack,
    numbers: tuple[int, ...],
    step: Callable[[Layer, int | jax.Array, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Calls `carry = step(layer, number, carry)` for the numbered layers, in order.

    The layers of a stack are one loop, whose body is compiled once.
    """
    if isinstance(layers, LayerStack) and numbers:

        def turn(number: jax.Array, carry: Carry) -> Carry:
            return step(layers.view(number), number, carry)

        begin, end = numbers[0], numbers[-1] + 1
        if numbers == tuple(range(begin, end)):  # on a GPU, to look numbers up is a launch
            every: Carry = lax.fori_loop(begin, end, turn, carry)
            return every
        chosen = jnp.array(numbers, jnp.int32)
        return lax.scan(lambda carry, number: (turn(number, carry), None), carry, chosen)[0]
    for number in numbers:
        carry = step(layers[number], number, carry)
    return carry


def with_one_form(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Returns layers whose lists of escapes (`pallas_kernels.bfloat12`) have one length each."""

    def is_listed(value: Any) -> bool:
        return isinstance(value, Bfloat12Weight)

    flat: list[Any] = [jax.tree.flatten(layer, is_leaf=is_listed) for layer in layers]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        return layers
    alike = []
    for matrices in zip(*(leaves for leaves, _ in flat), strict=True):
        if is_listed(matrices[0]):
            most = max(weight.escapes.shape[1] for weight in matrices)
            alike.append([with_room(weight, most) for weight in matrices])
        else:
            alike.append(list(matrices))
    return tuple(structure.unflatten(leaves) for leaves in zip(*alike, strict=True))


def can_be_stacked(layers: tuple[Layer, ...]) -> bool:
    """Whether layers have one form, and kernels can read their matrices in a stack."""
    linears = [getattr(layers[0], name) for name in LINEARS]
    if not all(reads_all_alike(linear.weight, "a4") for linear in linears):
        return False
    forms = [jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape}", layer) for layer in layers]
    return all(each == forms[0] for each in forms)


def stack(layers: list[Layer]) -> LayerStack:
    """Stacks layers of one form. The list is emptied, so that no array is held twice for long."""
    count, structure = len(layers), jax.tree.structure(layers[0])
    leaves = [jax.tree.leaves(layer) for layer in layers]
    layers.clear()
    stacks = [_stack([each.pop() for each in leaves]) for _ in leaves[0].copy()]
    return LayerStack(jax.tree.unflatten(structure, stacks[::-1]), count)


def _stack(arrays: list[jax.Array]) -> jax.Array:
    """Stacks arrays in the order of the list, which is emptied."""
    if isinstance(arrays[0], jax.core.Tracer):
        return jnp.stack(arrays)
    whole = _empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    for index in reversed(range(len(arrays))):
        whole[index] = np.asarray(arrays.pop())
    stacked: jax.Array = jax.device_put(whole)
    return stacked


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array that JAX takes over without a copy, because it begins at a whole line."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)
