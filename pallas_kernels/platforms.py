"""One operation with a kernel per platform, each traced only when it is needed.

`jax.lax.platform_dependent` traces every platform's kernel wherever the operation occurs. Tracing
the Pallas kernels of GPUs and TPUs takes longer than tracing the rest of a model. Here a kernel is
traced when a program is lowered for its platform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_kernels.settings import own_settings

Flat = Callable[..., list[jax.Array]]  # arrays -> arrays

_PLATFORMS = ("cpu", "cuda", "tpu")


def by_platform(
    *operands: Any, result: Any, default: Callable[..., Any], **kernels: Callable[..., Any]
) -> Any:
    """Calls the kernel of the platform that the program is compiled for.

    Args:
      *operands: the kernels' arguments, trees of arrays.
      result: the tree of the kernels' results, with a jax.ShapeDtypeStruct for every array.
      default: the kernel of platforms that have none of their own.
      **kernels: kernels by platform: cpu, cuda, tpu. They must not close over traced arrays.

    Returns:
      The kernel's result.
    """
    leaves, tree = jax.tree.flatten(operands)
    shapes, out_tree = jax.tree.flatten(result)

    def flat(kernel: Callable[..., Any]) -> Flat:
        return lambda *leaves: jax.tree.leaves(kernel(*jax.tree.unflatten(tree, leaves)))

    outputs = _operation.bind(
        *leaves,
        shapes=tuple((each.shape, each.dtype) for each in shapes),
        default=flat(default),
        **{platform: flat(kernel) for platform, kernel in kernels.items()},
    )
    return jax.tree.unflatten(out_tree, outputs)


def deferred(package: str, name: str) -> Callable[..., Any]:
    """Defers the import of a subpackage until its function `name` is called.

    Importing Pallas for GPUs and TPUs takes half a second.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(f"pallas_kernels.{package}"), name)(*arguments, **options)

    return call


_operation = Primitive("by_platform")
_operation.multiple_results = True
_operation.def_impl(lambda *leaves, **options: jax.jit(_bind(options))(*leaves))


def _bind(options: dict[str, Any]) -> Flat:
    return lambda *leaves: _operation.bind(*leaves, **options)


def _shapes(*_: Any, shapes: Sequence[tuple[Any, Any]], **__: Flat) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]


_operation.def_abstract_eval(_shapes)


def _batched(
    leaves: Sequence[Any], axes: Sequence[int | None], *, shapes: Any, **kernels: Flat
) -> tuple[list[jax.Array], list[int]]:
    """The operation under vmap, with every kernel under vmap."""
    (size,) = {
        leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None
    }
    outputs = _operation.bind(
        *leaves,
        shapes=tuple(((size, *shape), dtype) for shape, dtype in shapes),
        **{name: jax.vmap(kernel, in_axes=tuple(axes)) for name, kernel in kernels.items()},
    )
    return outputs, [0] * len(outputs)


batching.primitive_batchers[_operation] = _batched


def _lower(platform: str) -> Any:
    """The rule that lowers the operation for a platform."""

    @own_settings()
    def traced(*leaves: jax.Array, shapes: Any, **kernels: Flat) -> list[jax.Array]:
        return kernels.get(platform, kernels["default"])(*leaves)

    return mlir.lower_fun(traced)


for _platform in _PLATFORMS:
    mlir.register_lowering(_operation, _lower(_platform), platform=_platform)
mlir.register_lowering(_operation, _lower("default"))
