"""Measures the machine's bytes and operations per second, for the limits in benchmarks.

On a CPU the kernels' own threads and vectors measure them (`pallas_kernels.cpu.probe`). On a GPU
XLA measures the bandwidth by a maximum over more memory than any cache has, and the peaks by large
square products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.support import common
from pallas_kernels.cpu import probe

# More than the caches of most processors and of all GPUs hold.
LEAST_BYTES = {"cpu": 220_000_000, "gpu": 200_000_000}
GPU_BYTES, GPU_SIDE = 2**32, 8192
TRIES = 9
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def device_name() -> str:
    """The GPU's name, or the processor's."""
    where = common.environment()
    return where["processor"] if jax.default_backend() == "cpu" else where["device"]


def beyond_caches() -> int:
    """Bytes of which no cache keeps much from one reading to the next: twice the largest cache's,
    where Linux names its size, and at least `LEAST_BYTES`."""
    least = LEAST_BYTES[jax.default_backend()]
    if jax.default_backend() != "cpu":
        return least
    sizes = (file.read_text().strip() for file in CACHES.glob("index*/size"))  # "2048K"
    return max([least, *(2 * 1024 * int(size.removesuffix("K")) for size in sizes)])


def rates() -> dict[str, float]:
    """The best of a few tries: "read" in bytes per second; "integer", "integer16", "bfloat16" and
    "float32" in operations per second, where they are known."""
    return _of_cpu() if jax.default_backend() == "cpu" else _of_gpu(GPU_BYTES, GPU_SIDE)


def _of_cpu() -> dict[str, float]:
    data = jnp.zeros(beyond_caches(), jnp.uint8)
    found = {"read": max(probe.read_bandwidth(data) for _ in range(TRIES))}
    for arithmetic in probe.ARITHMETICS:
        found[arithmetic] = max(probe.peak(arithmetic) for _ in range(TRIES))
    found["integer16"] = found["integer"] / 2  # two products of bytes each
    return found


def _of_gpu(size: int, side: int) -> dict[str, float]:
    """Reads `size` bytes, multiplies matrices of `side` rows and columns."""
    data = jnp.zeros(size // 4, jnp.int32)
    found = {"read": size / _seconds(jnp.max, data)}
    for name, dtype, result in (
        ("integer", jnp.int8, jnp.int32),
        ("bfloat16", jnp.bfloat16, jnp.float32),
    ):
        matrix = jnp.ones((side, side), dtype)

        def square(x: jax.Array, result: jnp.dtype = result) -> jax.Array:
            contract_last = (((1,), (1,)), ((), ()))
            return jax.lax.dot_general(x, x, contract_last, preferred_element_type=result)

        found[name] = 2 * side**3 / _seconds(square, matrix)
    return found


def _seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """The shortest of a few calls. Each call takes a millisecond or more."""
    compiled = jax.jit(function).lower(x).compile()
    jax.block_until_ready(compiled(x))
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - start)
    return min(times)
