"""Times every matrix product of four real models' layers, beside the machine's limit.

The limit is the larger of bytes / bandwidth and operations / peak, both measured in this run
(`rates.py`). The products read copies of the weight in turn that together exceed the last-level
cache; of a small weight, 400. XLA's product of the same values in 16 bits, and PyTorch's kernels
where installed, are timed too. The script runs on a CPU or on a GPU.

    python -m benchmarks.kernels.products --json OUT [--models Llama-3.2-1B] [--rows 1 4 16]
    [--kernels w4a8]
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import torch_kernels
from benchmarks.kernels.rates import beyond_caches, device_name, rates
from benchmarks.support import common
from pallas_kernels import cpu, mosaic_gpu
from pallas_kernels.activations import Activation
from pallas_kernels.bfloat12 import Bfloat12Weight, bfloat12
from pallas_kernels.formats import Bfloat16Weight, Int4Weight, Int8Weight, Mxfp4Weight, Quantized
from pallas_kernels.matmul import matmul
from pallas_kernels.weight_values import plain_values
from pallas_kernels.weights import Weight
from specjax.model.params import prepack_weight

LAYERS = {  # (K, N) of the linear layers, each once
    "Llama-3.2-1B": ((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)),
    "Llama-3.2-3B": ((3072, 3072), (3072, 1024), (3072, 8192), (8192, 3072)),
    "Llama-3-8B": ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)),
    "Qwen2.5-7B": ((3584, 3584), (3584, 512), (3584, 18944), (18944, 3584)),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BFLOAT16_SETS = {"avx512_amx", "avx512_bf16"}  # instruction sets that multiply bfloat16
MOST_COPIES = 400  # of a small weight: a program has a product for each, and must compile
# How often one program reads all copies. A GPU would finish one pass before the next launch.
PASSES = {"cpu": 1, "gpu": 20}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A format at a precision. `arithmetic` is the type of its products."""

    make: Callable[[np.random.Generator, int, int], Weight]
    activation: Activation
    arithmetic: str


def _bytes(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(0, 256, shape, dtype=np.uint8))


def _scales(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.uniform(0.005, 0.01, shape), jnp.bfloat16)


def _int4(rng: np.random.Generator, n: int, k: int) -> Int4Weight:
    return Int4Weight(_bytes(rng, n, k // 2), _scales(rng, n, k // 128), k)


def _q4_1(rng: np.random.Generator, n: int, k: int) -> Int4Weight:
    """As in GGUF files: groups of 32 with minima."""
    scales, minima = (_scales(rng, n, k // 32) for _ in range(2))
    return Int4Weight(_bytes(rng, n, k // 2), scales, k, 32, minima=minima)


def _mxfp4(rng: np.random.Generator, n: int, k: int) -> Mxfp4Weight:
    exponents = jnp.asarray(rng.integers(118, 124, (n, k // 32), dtype=np.uint8))
    return Mxfp4Weight(_bytes(rng, n, k // 2), exponents, k)


def _int8(rng: np.random.Generator, n: int, k: int) -> Int8Weight:
    return Int8Weight(_bytes(rng, n, k).view(jnp.int8), _scales(rng, n, 1), k)


def _bfloat16(rng: np.random.Generator, n: int, k: int) -> Bfloat16Weight:
    values = jnp.asarray(rng.normal(size=(1, k)) * 0.02, jnp.bfloat16).view(jnp.uint16)
    return Bfloat16Weight(jnp.tile(values, (n, 1)))


def _bfloat12(rng: np.random.Generator, n: int, k: int) -> Bfloat12Weight:
    """In 12 bits, normal weights of which some are escapes; 512 outputs are repeated."""
    values = jnp.asarray(rng.normal(size=(512, k)) * 0.02, jnp.bfloat16)
    weight, _ = bfloat12(values.view(jnp.uint16))
    assert weight is not None and n % 512 == 0
    return jax.tree.map(lambda leaf: jnp.tile(leaf, (n // 512, 1, 1)[: leaf.ndim]), weight)


def kernels() -> dict[str, Kernel]:
    """The measured kernels. 16-bit products are bfloat16 where the machine multiplies that."""
    has_bfloat16 = jax.default_backend() != "cpu" or not BFLOAT16_SETS.isdisjoint(
        cpu.native.instruction_sets()
    )
    wide = "bfloat16" if has_bfloat16 else "float32"
    return {
        "w4a16": Kernel(_int4, "a16", wide),
        "w4a8": Kernel(_int4, "a8", "integer"),
        "w4a4": Kernel(_int4, "a4", "integer"),
        "q4_1a16": Kernel(_q4_1, "a16", wide),
        "q4_1a8": Kernel(_q4_1, "a8", "integer"),
        "mxfp4a16": Kernel(_mxfp4, "a16", wide),
        "mxfp4a8": Kernel(_mxfp4, "a8", "integer"),
        "w8a8": Kernel(_int8, "a8", "integer"),
        "w8a16": Kernel(_int8, "a16", "integer16" if jax.default_backend() == "cpu" else wide),
        "w16a16": Kernel(_bfloat16, "a16", wide),
        "w12a16": Kernel(_bfloat12, "a16", wide),
    }


def seconds(function: Callable[[int], object], calls: int, rounds: int = 7) -> float:
    """Median over rounds of the time per call. Call i gets i."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for i in range(calls):
            function(i)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])


@lru_cache(maxsize=1)
def _copies(kernel: Kernel, n: int, k: int) -> tuple[Weight, ...]:
    """Different weights that exceed the cache together, or `MOST_COPIES`."""
    rng = np.random.default_rng(0)
    first = prepack_weight(kernel.make(rng, n, k))
    count = min(max(2, beyond_caches() // first.nbytes + 1), MOST_COPIES)
    return (first, *(jax.tree.map(lambda leaf: leaf.copy(), first) for _ in range(count - 1)))


def time_chain(
    product: Callable[[jax.Array, Weight], jax.Array], x: jax.Array, weights: Sequence[Any]
) -> float:
    """Seconds per product, in one program that reads all weights one after another."""
    passes = PASSES[jax.default_backend()]

    @jax.jit
    def chain(x: jax.Array, weights: Sequence[Any]) -> jax.Array:
        def read_all(_: int, x: jax.Array) -> jax.Array:
            for weight in weights:
                y = product(x, weight)
                # The next product waits for this one, which changes nothing. (On a GPU this is a
                # launch, which also prepares x for our kernels.)
                x = x + (0 * y[:1, :1]).astype(x.dtype)
            return x

        return jax.lax.fori_loop(0, passes, read_all, x)

    def once(_: int) -> None:
        jax.block_until_ready(chain(x, weights))

    return seconds(once, calls=1) / (passes * len(weights))


def served_by(weight: Weight) -> str:
    """The kernels that `matmul` chooses for a weight here; on a CPU, the instruction set."""
    if jax.default_backend() == "cpu":
        return cpu.native.instruction_sets()[0]
    if not isinstance(weight, Quantized | Bfloat16Weight):
        return "reference"
    hopper = mosaic_gpu.is_hopper() and mosaic_gpu.supports(weight)
    return "mosaic_gpu" if hopper else "triton_gpu"


def measure(
    name: str, kernel: Kernel, rows: int, n: int, k: int, rates: dict[str, float]
) -> dict[str, Any]:
    """One line of the table."""
    weights = _copies(kernel, n, k)
    dtype = jnp.bfloat16
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, k)), dtype)
    took = time_chain(lambda x, w: matmul(x, w, kernel.activation), x, weights)
    moved = weights[0].nbytes + rows * (2 * k + 4 * n)
    by_bytes, by_operations = moved / rates["read"], 2 * rows * n * k / rates[kernel.arithmetic]
    limit = max(by_bytes, by_operations)
    return {
        "kernel": name, "m": rows, "k": k, "n": n,
        "group_size": getattr(weights[0], "group_size", None),
        "seconds": took, "limit_seconds": limit, "fraction": limit / took,
        "bound": "bytes" if by_bytes >= by_operations else "operations",
        "implementation": served_by(weights[0]),
        "device": device_name(),
    }  # fmt: skip


def peers(name: str, kernel: Kernel, rows: int, n: int, k: int) -> Iterator[tuple[str, float]]:
    """Seconds of other libraries for the same shape: XLA's 16-bit product, PyTorch's kernels."""
    weights = _copies(kernel, n, k)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, k)), jnp.bfloat16)
    if not isinstance(weights[0], Quantized):

        def product(x: jax.Array, weight: jax.Array) -> jax.Array:
            return jax.lax.dot_general(
                x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )

        plain = tuple(map(plain_values, weights))
        yield "xla", time_chain(product, x, plain)
    backend = jax.default_backend()
    yield from torch_kernels.times(
        name, rows, n, k, seconds, beyond_caches(),
        device="cpu" if backend == "cpu" else "cuda", passes=PASSES[backend],
    )  # fmt: skip


def measurements(
    shapes: Iterable[tuple[int, int]], names: Sequence[str], rows: Sequence[int], *, beside: bool
) -> Iterator[dict[str, Any]]:
    """Prints and yields the lines of the table.

    Args:
      shapes: (K, N) of the products.
      beside: whether to time other libraries' kernels too.
    """
    for k, n in shapes:
        measured = rates()  # now, because the speed of a machine drifts
        print({name: f"{value / 1e9:.1f} G/s" for name, value in measured.items()}, flush=True)
        for name in names:
            kernel = kernels()[name]
            for m in rows:
                line = measure(name, kernel, m, n, k, measured)
                line |= {f"rate_{key}": value for key, value in measured.items()}
                if beside:
                    line |= {f"{peer}_seconds": s for peer, s in peers(name, kernel, m, n, k)}
                print(_summary(line), flush=True)
                yield line


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--kernels", nargs="+", choices=kernels(), default=list(kernels()))
    parser.add_argument("--no-peers", action="store_true", help="only our own kernels")
    options = parser.parse_args()
    shapes = dict.fromkeys(shape for model in options.models for shape in LAYERS[model])
    lines = measurements(shapes, options.kernels, options.rows, beside=not options.no_peers)
    common.write(options.json, list(lines))


def _summary(line: dict[str, Any]) -> str:
    others = "".join(
        f"  {key[: -len('_seconds')]} {value * 1e3:.3f}"
        for key, value in line.items()
        if key.endswith("_seconds") and key != "limit_seconds"
    )
    return (
        f"{line['kernel']:9} M {line['m']:4} K {line['k']:6} N {line['n']:6} "
        f"{line['seconds'] * 1e3:8.3f} ms  {line['fraction']:4.0%} of the limit by "
        f"{line['bound']}{others}"
    )


if __name__ == "__main__":
    main()
