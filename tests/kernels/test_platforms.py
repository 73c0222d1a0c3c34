"""Only the current platform's kernel is traced, imported and called."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.platforms import by_platform

X = jnp.arange(6.0).reshape(2, 3)


class Kernels:
    """Kernels with different results, and the names of the traced ones."""

    def __init__(self) -> None:
        self.traced: list[str] = []

    def __call__(self, x: jax.Array, factor: jax.Array) -> dict[str, jax.Array]:
        result: dict[str, jax.Array] = by_platform(
            x,
            factor,
            result={"y": jax.ShapeDtypeStruct(x.shape, jnp.float32)},
            default=self._kernel("default", lax.neg),
            cpu=self._kernel("cpu", lax.exp),
            tpu=self._kernel("tpu", lax.tanh),
        )
        return result

    def _kernel(self, name, function):  # type: ignore[no-untyped-def]
        def kernel(x: jax.Array, factor: jax.Array) -> dict[str, jax.Array]:
            self.traced.append(name)
            assert jnp.arange(2).dtype == jnp.int32  # whatever the caller's settings are
            return {"y": function(x) * factor}

        return kernel


@pytest.mark.parametrize(
    ("platform", "operation", "traced"),
    [("cpu", "exponential", "cpu"), ("tpu", "tanh", "tpu"), ("cuda", "negate", "default")],
)
def test_only_the_platforms_kernel_is_traced(platform: str, operation: str, traced: str) -> None:
    kernels = Kernels()
    program = jax.jit(kernels).trace(X, 2.0)
    assert kernels.traced == []
    assert f"stablehlo.{operation}" in program.lower(lowering_platforms=(platform,)).as_text()
    assert kernels.traced == [traced]


@pytest.mark.parametrize("wide", [False, True])
def test_called_at_once_and_compiled(wide: bool) -> None:
    with jax.enable_x64(wide):
        for function in (Kernels(), jax.jit(Kernels())):
            np.testing.assert_array_equal(function(X, 2.0)["y"], jnp.exp(X) * 2)


def test_vmap_maps_every_kernel() -> None:
    y = jax.vmap(Kernels(), in_axes=(1, None))(X, jnp.float32(2))["y"]
    np.testing.assert_array_equal(y, jnp.exp(X.T) * 2)
    factors = jnp.arange(1.0, 5.0)
    y = jax.jit(jax.vmap(jax.vmap(Kernels(), (0, None)), (None, 0)))(X, factors)["y"]
    np.testing.assert_array_equal(y, jnp.exp(X) * factors[:, None, None])


def test_decoding_on_cpus_imports_no_kernels_of_accelerators() -> None:
    program = """
import sys
import specjax

params = specjax.load("tiny")
specjax.decode(params, [1, 2, 3], max_new_tokens=2, drafter=specjax.Autoregressive())
packages = ("mosaic_gpu", "mosaic_tpu", "triton_gpu")
print([name for name in packages if f"pallas_kernels.{name}" in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
