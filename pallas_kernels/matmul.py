"""The one door to every matrix kernel: picks the implementation, checks the shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax import lax

from pallas_kernels import mosaic_tpu, reference, triton_gpu
from pallas_kernels.activations import check_activation
from pallas_kernels.formats import Int4Weight, Weight

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.matmul,
    "triton_gpu": triton_gpu.matmul,
    "mosaic_tpu": mosaic_tpu.matmul,
}


@partial(jax.jit, static_argnames=("activation", "implementation"))
def matmul(
    x: jax.Array, weight: Weight, activation: str = "a16", *, implementation: str | None = None
) -> jax.Array:
    """Multiplies activations by a weight matrix at a chosen activation precision.

    Args:
      x: bf16 or f32[..., K].
      weight: `Int4Weight` or `Bfloat16Weight` of shape (N, K), or a plain bf16 or f32[N, K].
      activation: "a16" (the weight dequantized, x as it is), "a8" or "a4" (x quantized per token
        and group, integer products). A plain weight takes "a16" only.
      implementation: None for the platform's best, or one of `IMPLEMENTATIONS`.

    Returns:
      f32[..., N].

    Raises:
      ValueError: shapes, dtype, activation or implementation do not fit.
    """
    check_activation(activation)
    _check(x, weight, activation, implementation)
    rows = x.reshape(-1, x.shape[-1])
    y = _choose(weight, implementation)(rows, weight, activation)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _choose(weight: Weight, implementation: str | None) -> Callable[..., jax.Array]:
    if implementation is not None:
        return IMPLEMENTATIONS[implementation]
    if not isinstance(weight, Int4Weight):
        return reference.matmul
    return _by_platform


def _by_platform(x: jax.Array, weight: Int4Weight, activation: str) -> jax.Array:
    return lax.platform_dependent(
        x,
        weight,
        cuda=partial(triton_gpu.matmul, activation=activation),
        tpu=partial(mosaic_tpu.matmul, activation=activation),
        default=partial(reference.matmul, activation=activation),
    )


def _check(x: jax.Array, weight: Weight, activation: str, implementation: str | None) -> None:
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must end in the weight's {weight.shape[1]} inputs, got {x.shape}")
    if x.dtype.name not in ("bfloat16", "float32"):
        raise ValueError(f"x must be bfloat16 or float32, got {x.dtype.name}")
    if activation != "a16" and not isinstance(weight, Int4Weight):
        raise ValueError(
            f"activation {activation!r} needs an Int4Weight, got {type(weight).__name__}"
        )
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
