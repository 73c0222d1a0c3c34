"""The entry to every matrix kernel: `matmul` checks its arguments and picks the implementation.

Kernels multiply by plain columns. This module handles outliers, stored orders and clipping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, cast, overload, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import cpu, reference
from pallas_kernels.activations import Activation, check_activation, clip_activations
from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import (
    Bfloat16Weight,
    Int4Weight,
    Int8Weight,
    Outliers,
    check_one_offset,
)
from pallas_kernels.interleave import by_rows
from pallas_kernels.nested import Nested, NestedWeight
from pallas_kernels.planes import draft_plane
from pallas_kernels.platforms import by_platform, deferred
from pallas_kernels.rounding import check_float
from pallas_kernels.settings import own_settings
from pallas_kernels.stacks import Stacked, form, taken
from pallas_kernels.weights import Rounded, Weight, has_cheap_reading

Matrix = Weight | Stacked


@runtime_checkable
class Kernel(Protocol):
    """An implementation: x: [M, K] times several weights -> f32[M, N] for each."""

    def __call__(
        self, x: jax.Array, weights: tuple[Matrix, ...], *, activation: Activation
    ) -> tuple[jax.Array, ...]: ...


def _one_by_one(matmul: Callable[[jax.Array, Any, Activation], jax.Array]) -> Kernel:
    """Makes a kernel for several weights from one for a single weight."""

    def kernel(
        x: jax.Array, weights: tuple[Matrix, ...], *, activation: Activation
    ) -> tuple[jax.Array, ...]:
        return tuple(matmul(x, by_rows(taken(weight)), activation) for weight in weights)

    return kernel


Implementation = Literal["reference", "cpu", "mosaic_gpu", "triton_gpu", "mosaic_tpu"]
IMPLEMENTATIONS: dict[Implementation, Kernel] = {
    "reference": _one_by_one(reference.matmul),
    "cpu": cpu.matmul,
    "mosaic_gpu": _one_by_one(deferred("mosaic_gpu", "matmul")),
    "triton_gpu": _one_by_one(deferred("triton_gpu", "matmul")),
    "mosaic_tpu": _one_by_one(deferred("mosaic_tpu", "matmul")),
}


@overload
def matmul(
    x: Float[Array, "*rows K"],
    weight: Matrix,
    activation: Activation = ...,
    *,
    implementation: Implementation | None = ...,
) -> Float[Array, "*rows N"]: ...
@overload
def matmul(
    x: Float[Array, "*rows K"],
    weight: tuple[Matrix, ...],
    activation: Activation = ...,
    *,
    implementation: Implementation | None = ...,
) -> tuple[Float[Array, "*rows _"], ...]: ...
@partial(jax.jit, static_argnames=("activation", "implementation"))
@own_settings()
def matmul(
    x: Float[Array, "*rows K"],
    weight: Matrix | tuple[Matrix, ...],
    activation: Activation = "a16",
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*rows N"] | tuple[Float[Array, "*rows _"], ...]:
    """Multiplies activations by a weight matrix at a chosen activation precision.

    Args:
      x: bf16 or f32[..., K].
      weight: a weight in any format (`pallas_kernels.formats`) of shape (N, K), or a plain bf16 or
        f32[N, K], alone or `Stacked`; or a tuple of weights, for which x is quantized once.
      activation: "a16" dequantizes the weight and takes x as it is; on CPUs an 8-bit weight reads a
        bfloat16 x as integers of 16 bits (`activations.split_activations`), and so does a 4-bit one
        where the processor has no products of bfloat16, or has tiles. "a8" and "a4" quantize x per
        token and group and multiply integers. Outlier columns then take 8 bits, and a weight's
        `activation_clip` applies to "a4". An unquantized weight accepts only "a16". A nested
        weight's draft plane serves "a8" and "a4".
      implementation: one of `IMPLEMENTATIONS`; None chooses the best for the platform.

    Returns:
      f32[..., N]; a tuple of them for a tuple of weights.

    Raises:
      ValueError: shapes do not match, or a dtype, `activation` or `implementation` is not accepted.
    """
    weights = weight if isinstance(weight, tuple) else (weight,)
    check_activation(activation)
    _check(x, weights, activation, implementation)
    weights = tuple(plane(each, activation) for each in weights)
    kernel = _by_platform if implementation is None else IMPLEMENTATIONS[implementation]
    products = _products(x.reshape(-1, x.shape[-1]), weights, activation, kernel)
    products = tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in products)
    return products if isinstance(weight, tuple) else products[0]


def plane(weight: Matrix, activation: Activation) -> Matrix:
    """The plane of a nested weight that a product reads; other weights as they are.

    Their arrays may have one more axis in front, as in a stack.
    """
    if isinstance(weight, Stacked):
        return Stacked(cast(Weight, plane(weight.stack, activation)), weight.index)
    if not isinstance(weight, Nested):
        return weight
    if activation != "a16":
        return draft_plane(weight)
    return weight.exact if isinstance(weight, NestedWeight) else weight


def _products(
    x: jax.Array, weights: tuple[Matrix, ...], activation: Activation, kernel: Kernel
) -> tuple[jax.Array, ...]:
    """x: [M, K] -> f32[M, N] for every weight."""
    if x.shape[0] == 0:
        return tuple(jnp.zeros((0, weight.shape[0])) for weight in weights)
    if all(reads_all_alike(form(weight), activation) for weight in weights):
        return kernel(x, weights, activation=activation)
    return tuple(_product(x, taken(weight), activation, kernel) for weight in weights)


def _product(x: jax.Array, weight: Weight, activation: Activation, kernel: Kernel) -> jax.Array:
    """x: [M, K] -> f32[M, N], for a weight with outliers, an order or a clip.

    Outliers are multiplied separately, so they do not affect the scales of the other inputs.
    """
    outliers, order = _outliers(weight), _order(weight)
    inner = x
    if outliers is not None:
        inner = inner.at[:, outliers.columns].set(0)
        weight = dataclasses.replace(cast(Int4Weight, weight), outliers=None)
    if order is not None:
        inner = inner[:, order]
        weight = dataclasses.replace(cast(Int4Weight | Int8Weight, weight), order=None)
    if _clip(weight, activation) != 1:
        weight = cast(Int4Weight, weight)
        inner = clip_activations(inner, weight.group_size, weight.activation_clip)
    (y,) = kernel(inner, (weight,), activation=activation)
    if outliers is None:
        return y
    precision: Activation = "a16" if activation == "a16" else "a8"
    return y + kernel(x[:, outliers.columns], (outliers.weight,), activation=precision)[0]


def reads_all_alike(weight: Weight, activation: Activation) -> bool:
    """Whether kernels can read x unchanged: the weight has no outliers, no order and no clip."""
    weight = cast(Weight, plane(weight, activation))
    return _outliers(weight) is None and _order(weight) is None and _clip(weight, activation) == 1


def _outliers(weight: Weight) -> Outliers | None:
    return weight.outliers if isinstance(weight, Int4Weight) else None


def _order(weight: Weight) -> jax.Array | None:
    return weight.order if isinstance(weight, Int4Weight | Int8Weight) else None


def _clip(weight: Weight, activation: Activation) -> float:
    return weight.activation_clip if isinstance(weight, Int4Weight) and activation == "a4" else 1.0


def _gpu_matmul(
    x: jax.Array, weights: tuple[Any, ...], *, activation: Activation
) -> tuple[jax.Array, ...]:
    """Calls the Hopper kernel if it serves this device and all weights, else that for all GPUs."""
    from pallas_kernels import mosaic_gpu, triton_gpu

    weights = tuple(_by_rows(weight) for weight in weights)
    if on_hopper(weights):
        return mosaic_gpu.products(x, weights, activation)
    return triton_gpu.products(x, weights, activation)


def on_hopper(weights: tuple[Any, ...]) -> bool:
    """Whether the Hopper kernel serves the GPU that a program is traced for, and all weights."""
    from pallas_kernels import mosaic_gpu

    return mosaic_gpu.is_hopper() and all(map(mosaic_gpu.supports, weights))


def _by_rows(weight: Matrix) -> Matrix:
    """The weight row by row: one that was interleaved for a CPU is copied."""
    return weight if in_rows(form(weight)) else by_rows(taken(weight))


def in_rows(weight: Weight) -> bool:
    """Whether accelerators read the weight as it is stored, not interleaved for a CPU."""
    return isinstance(weight, Bfloat12Weight) or getattr(weight, "out_features", None) is None


def has_kernel(platform: str, weight: Weight, x: jax.Array) -> bool:
    """Whether an accelerator has a kernel for the weight and this x; else the reference serves."""
    if isinstance(weight, Bfloat16Weight):
        return bool(x.dtype == jnp.bfloat16)
    if isinstance(weight, Bfloat12Weight):
        return platform == "cuda" and bool(x.dtype == jnp.bfloat16)
    if isinstance(weight, Int8Weight):
        return weight.zeros is None
    return isinstance(weight, Rounded)


def _by_platform(
    x: jax.Array, weights: tuple[Matrix, ...], *, activation: Activation
) -> tuple[jax.Array, ...]:
    kernels: dict[str, Kernel] = {"cpu": cpu.matmul} if cpu.available() else {}
    for platform, kernel in (("cuda", _gpu_matmul), ("tpu", IMPLEMENTATIONS["mosaic_tpu"])):
        if all(has_kernel(platform, form(weight), x) for weight in weights):
            kernels[platform] = kernel
    products: tuple[jax.Array, ...] = by_platform(
        x,
        weights,
        result=tuple(jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32) for w in weights),
        default=partial(IMPLEMENTATIONS["reference"], activation=activation),
        **{
            platform: partial(kernel, activation=activation) for platform, kernel in kernels.items()
        },
    )
    return products


def _check(
    x: jax.Array,
    weights: tuple[Matrix, ...],
    activation: Activation,
    implementation: Implementation | None,
) -> None:
    for weight in weights:
        held = form(weight)
        if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
            raise ValueError(f"x must end in the weight's {weight.shape[1]} inputs, got {x.shape}")
        if isinstance(held, Int4Weight | Int8Weight):
            check_one_offset(held.zeros, held.minima)
        if activation != "a16" and not has_cheap_reading(held):
            raise ValueError(
                f"activation {activation!r} needs a quantized weight, got a 16- or 32-bit one"
            )
    check_float("x", x.dtype)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
