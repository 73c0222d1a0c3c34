"""Products of every weight format on CPUs, by the C++ library (src/matmul/matmul.cc)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels.activations import LEVELS, Activation
from pallas_kernels.cpu.batches import entry
from pallas_kernels.cpu.native import WEIGHT_KINDS, check_available, instruction_sets
from pallas_kernels.formats import plain_weight
from pallas_kernels.stacks import Stacked, form
from pallas_kernels.weights import Weight, check_plain_columns

Buffers = tuple[jax.Array, ...]

POINTS = ("zeros", "minima")  # the part that follows the scales, numbered from 1


def available() -> bool:
    """Whether the library was found, built from this package's sources."""
    return bool(instruction_sets())


def matmul(
    x: jax.Array,
    weights: tuple[Weight | Stacked, ...],
    *,
    activation: Activation = "a16",
    instruction_set: str | None = None,
) -> tuple[jax.Array, ...]:
    """Multiplies x by several weights.

    Weights that are `Stacked` are read where they lie.

    Args:
      x: bf16 or f32[M, K].
      weights: (N, K) each.
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      instruction_set: one of `native.instruction_sets()`; None for the best.

    Returns:
      f32[M, N] for each weight.

    Raises:
      ValueError: the library was not built, or this machine lacks the instruction set.
    """
    check_available("implementation 'cpu'", instruction_set)
    outputs = tuple(weight.shape[0] for weight in weights)
    described = [describe(form(weight), activation) for weight in weights]
    buffers: Buffers = ()
    for weight, each in zip(weights, described, strict=True):
        each.attributes["stacked"] = isinstance(weight, Stacked)
        buffers += (*each.buffers, *((weight.index,) if isinstance(weight, Stacked) else ()))
    attributes = collected(described) | {"instruction_set": instruction_set or ""}
    return _batched_by_rows(outputs, attributes)(x, buffers)


class Description(NamedTuple):
    """A weight, or a stack of weights of one form, for src/matmul/weights.h."""

    attributes: dict[str, int]
    buffers: Buffers


def describe(weight: Weight, activation: Activation) -> Description:
    """Describes a weight whose arrays may have one more axis in front."""
    check_plain_columns(weight)
    held = plain_weight(weight) if isinstance(weight, jax.Array) else weight
    name = held.dtype.name if isinstance(held, jax.Array) else type(held).__name__
    points = [name for name in POINTS if getattr(held, name, None) is not None]
    attributes = {
        "kinds": WEIGHT_KINDS.index(name),
        "group_sizes": getattr(held, "group_size", None) or 0,  # 0: one scale per output
        "points": 1 + POINTS.index(points[0]) if points else 0,
        "outputs": getattr(held, "out_features", None) or 0,  # 0: stored row by row
        "levels": LEVELS.get(activation, 0),
    }
    return Description(attributes, tuple(jax.tree.leaves(held)))


def collected(described: Sequence[Description]) -> dict[str, Any]:
    """The attributes of several weights, each as one array."""
    names = described[0].attributes
    return {
        name: np.array([each.attributes[name] for each in described], np.int64) for name in names
    }


def _batched_by_rows(
    outputs: tuple[int, ...], attributes: dict[str, object]
) -> Callable[[jax.Array, Buffers], tuple[jax.Array, ...]]:
    """The FFI call. Under vmap, batched x becomes more rows; batched weights run one by one."""

    @custom_vmap
    def call(x: jax.Array, buffers: Buffers) -> tuple[jax.Array, ...]:
        results = [jax.ShapeDtypeStruct((x.shape[0], n), jnp.float32) for n in outputs]
        return tuple(jax.ffi.ffi_call("specjax_matmul", results)(x, *buffers, **attributes))

    @call.def_vmap
    def batched(
        axis_size: int, in_batched: list[Any], x: jax.Array, buffers: Buffers
    ) -> tuple[Buffers, tuple[bool, ...]]:
        def one(index: jax.Array) -> Buffers:
            products: Buffers = call(*entry((x, buffers), tuple(in_batched), index))
            return products

        if any(in_batched[1]):
            ys: Buffers = lax.map(one, jnp.arange(axis_size))
        else:
            ys = call(x.reshape(-1, x.shape[-1]), buffers)
            ys = tuple(y.reshape(axis_size, -1, y.shape[-1]) for y in ys)
        return ys, (True,) * len(outputs)

    return call
