"""Checks the kernels on this machine's GPU in less than ten minutes (`make gpu-check`).

1. Numerics: compares every format, activation precision and awkward size of the GPU kernels, and
   attention over every cache, with float64 on fresh random inputs (`--seed` repeats a run). Also
   checks that a row's bits, those of norms too, do not depend on the number of rows or tokens,
   and that layers run together have the bits of layers one by one.
2. Exactness: compares QSpec's output on the bundled model with plain decoding's.
3. Speed: times attention with Llama-3-8B's heads beside the time to read its cache, and the
   model's layers beside the GPU's measured limits, XLA's 16-bit product and PyTorch's kernels
   (`benchmarks/kernels/products.py`), until the time is up.

    python -m benchmarks.gpu_check [--seed N] [--json OUT]
    python -m benchmarks.gpu_check --parts attention decoding

A case that raises has failed, and the others go on. With `--parts`, several processes can share the
work of compiling. The result is benchmarks/results/<device>/gpu_check.json. The exit status is 1 if
a check fails or the machine has no GPU. `--implementation cpu` (or reference) runs the same checks
without a GPU.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.exactness import attention_check, layers_check
from benchmarks.kernels.products import LAYERS, kernels, measurements
from benchmarks.kernels.rates import device_name
from benchmarks.support.checks import tried
from benchmarks.support.common import ROOT, parser, table, write
from pallas_kernels import mosaic_gpu
from pallas_kernels.activations import (
    ACTIVATIONS,
    Activation,
    quantize_activations,
    split_activations,
)
from pallas_kernels.bfloat12 import bfloat12
from pallas_kernels.formats import (
    GROUP_SIZES,
    PLANE,
    Bfloat16Weight,
    Int4Weight,
    Int8Weight,
    int4_from_integers,
    int8_from_integers,
    mxfp4_from_codes,
    padded_inputs,
)
from pallas_kernels.matmul import IMPLEMENTATIONS, Implementation, matmul
from pallas_kernels.nested import Nested, NestedInt8Weight
from pallas_kernels.norms import rms_norm
from pallas_kernels.planes import LARGEST, SMALLEST, nested_int8_from_integers
from pallas_kernels.weight_values import dequantize
from pallas_kernels.weights import has_cheap_reading

PARTS = ("products", "norms", "entries", "attention", "layers", "decoding", "speed")
SECONDS = 240  # of measuring; the checks before take up to five minutes
SHAPES = ((192, 2300), (67, 300))  # N, K: several segments and one; N for Hopper and odd
ROWS = (1, 9, 17, 33, 64)  # one for each tile of the kernels
SCALES = dict(zip(GROUP_SIZES, ("float16", "float32", "bfloat16", "bfloat16"), strict=True))
Weights = dict[str, Any]
Lines = list[dict[str, Any]]


def main() -> int:
    options = _options()
    implementations = options.implementation or _of_gpu()
    if not implementations:
        print(f"no GPU found: JAX sees {jax.devices()}; try --implementation")
        return 1
    print(f"{device_name()}, {', '.join(implementations)}, --seed {options.seed}", flush=True)
    checks: dict[str, Callable[[], Lines]] = {
        "products": lambda: numerics(implementations, options.seed),
        "norms": lambda: norms(options.seed),
        "entries": lambda: attention_check.entries(options.seed),
        "attention": lambda: attention_check.numerics(implementations, options.seed),
        "layers": lambda: layers_check.lines(options.seed),
        "decoding": lambda: exactness(options.seed),
    }
    lines = [
        line for part, run in checks.items() if part in options.parts for line in _report(run())
    ]
    failed = sum(not line["passed"] for line in lines)
    if "speed" in options.parts:
        lines += speed(implementations, options)
    name = re.sub(r"\W+", "_", device_name()).lower()
    path = options.json or ROOT / "benchmarks" / "results" / name / "gpu_check.json"
    try:
        write(path, [{"seed": options.seed} | line for line in lines])
    except ValueError as error:  # the checks count without a file, too
        print(f"nothing is written: {error}")
    print(f"{failed} checks failed (--seed {options.seed})" if failed else "all checks passed")
    return 1 if failed else 0


def _report(lines: Lines) -> Lines:
    failed = [line for line in lines if not line["passed"]]
    print(f"{lines[0]['check']}: {len(lines)} cases, {len(failed)} failed", flush=True)
    if failed:
        print(table(failed, list(dict.fromkeys(name for line in failed for name in line))))
    return lines


def speed(implementations: list[str], options: Any) -> Lines:
    """Times attention and then the layers, until the time is up."""
    end = time.monotonic() + options.seconds
    lines = attention_check.speed(implementations)
    shapes = LAYERS[options.model]
    for line in measurements(shapes, options.kernels, options.rows, beside=not options.no_peers):
        lines.append({"check": "speed"} | line)
        if time.monotonic() > end:
            print(f"{options.seconds} seconds are over: the remaining measurements are skipped")
            break
    return lines


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--implementation", nargs="+", choices=IMPLEMENTATIONS, help="default: those of the GPU")
    add("--seed", type=int, default=secrets.randbelow(2**31))
    add("--model", choices=LAYERS, default="Llama-3-8B", help="whose layers are timed")
    add("--rows", nargs="+", type=int, default=[1, 16, 64, 128])
    add("--kernels", nargs="+", choices=kernels(), default=["w4a16", "w4a8", "mxfp4a8", "w16a16"])
    add("--no-peers", action="store_true", help="only our own kernels")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--seconds", type=int, default=SECONDS, help="no speed is measured after these")
    return parse.parse_args()


def _of_gpu() -> list[str]:
    """The implementations for this machine's GPU; empty without a GPU."""
    if jax.default_backend() != "gpu":
        return []
    return ["mosaic_gpu", "triton_gpu"] if mosaic_gpu.is_hopper() else ["triton_gpu"]


# --- Numerics


def numerics(implementations: list[str], seed: int) -> Lines:
    """One line per implementation, weight and precision."""
    rng = np.random.default_rng(seed)
    cases = []
    for n, k in SHAPES:
        scaled = rng.normal(size=(ROWS[-1], k)) * rng.uniform(0.1, 10, (ROWS[-1], 1))
        x = jnp.asarray(scaled, jnp.bfloat16)
        for (name, weight), implementation in product(
            random_weights(rng, n, k).items(), implementations
        ):
            nested = isinstance(weight, Nested)  # in other precisions it is a weight of 4 bits
            readings = ACTIVATIONS if has_cheap_reading(weight) and not nested else ("a16",)
            if implementation != "mosaic_gpu" or mosaic_gpu.supports(weight):
                cases += [(implementation, name, weight, each, x) for each in readings]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilation takes most of the time
        return list(pool.map(lambda case: _check_product(*case), cases))


def random_weights(rng: np.random.Generator, n: int, k: int) -> Weights:
    """A weight (n, k) of every format with a kernel, group size and type of scale."""

    def integers(low: int, high: int, *shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(low, high, shape), jnp.int8)

    def scales(group_size: int | None, dtype: str) -> jax.Array:
        groups = 1 if group_size is None else -(-k // group_size)
        return jnp.asarray(rng.uniform(0.005, 0.04, (n, groups)), dtype)

    weights: Weights = {}
    for size, dtype in SCALES.items():
        s = scales(size, dtype)
        weights[f"int4-{size}"] = int4_from_integers(integers(-8, 8, n, k), s, size)
        weights[f"int4-{size}-zeros"] = int4_from_integers(
            integers(-8, 8, n, k), s, size, integers(-8, 8, *s.shape)
        )
        weights[f"int8-{size}"] = int8_from_integers(integers(-128, 128, n, k), s, size)
    exponents = jnp.asarray(rng.integers(118, 124, (n, -(-k // 32))), jnp.uint8)
    weights["mxfp4"] = mxfp4_from_codes(
        jnp.asarray(rng.integers(0, 16, (n, k)), jnp.uint8), exponents
    )
    sixteenths = integers(SMALLEST, LARGEST + 1, n, k)
    weights["nested8-64"] = nested_int8_from_integers(sixteenths, scales(64, "bfloat16"), 64)
    values = jnp.asarray(rng.normal(size=(n, k)), jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint16)
    weights |= {"bfloat16": Bfloat16Weight(bits), "bfloat12": bfloat12(bits, most_escapes=1)[0]}
    return weights


def _check_product(
    implementation: Implementation, name: str, weight: Any, activation: Activation, x: jax.Array
) -> dict[str, Any]:
    """Compares a product with float64, and its rows bit for bit between different numbers of rows.

    The bound is |y − exact| ≤ 2^-19 · Σ_k |x[m, k]| · |w[n, k]|, which is 32 roundings of float32.
    Where zeros are subtracted after the sum, |w[n, k]| grows by 16 · scale. One misplaced nibble or
    scale costs 2^-10 or more.
    """

    def run(x: jax.Array) -> np.ndarray:
        return np.asarray(matmul(x, weight, activation, implementation=implementation))

    def check() -> dict[str, Any]:
        own = isinstance(weight, Int8Weight | NestedInt8Weight)
        split = implementation in ("cpu", "reference") and own
        values = _represented(x, weight, activation, split)
        w = np.asarray(dequantize(weight), np.float64)
        magnitude = np.abs(w)
        if isinstance(weight, Int4Weight) and weight.zeros is not None:
            magnitude = magnitude + 16 * float(weight.scales.max())
        y = run(x)
        error = np.abs(y - values @ w.T) / (np.abs(values) @ magnitude.T * 2.0**-19 + 1e-30)
        differ = [m for m in ROWS if (run(x[:m]).view(np.int32) != y[:m].view(np.int32)).any()]
        if (run(x[::-1])[::-1].view(np.int32) != y.view(np.int32)).any():
            differ.append("reversed")
        worst = float(error.max())  # a NaN is not within the bound
        passed = worst <= 1 and not differ
        return {"error_of_bound": worst, "rows_that_differ": differ, "passed": passed}

    return {
        "check": "numerics", "implementation": implementation, "weight": name,
        "n": weight.shape[0], "k": weight.shape[1], "activation": activation, **tried(check),
    }  # fmt: skip


def _represented(x: jax.Array, weight: Any, activation: str, split: bool) -> np.ndarray:
    """The values of the activations as a product reads them, f64[M, K].

    split: "a16" rounds them to integers of 16 bits (`activations.split_activations`).
    """
    if activation == "a16" and not split:
        return np.asarray(x, np.float64)
    m, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, padded_inputs(k) - k))).astype(jnp.float32)
    if activation == "a16":
        high, low, scales = split_activations(x, weight.group_size or PLANE)
        q = 256 * np.asarray(high, np.float64) + np.asarray(low)
    else:
        # On a GPU, XLA approximates the reciprocals of scales, and some values move by one step.
        on_cpu = jax.device_put(x, jax.devices("cpu")[0])
        q, scales = jax.jit(quantize_activations, static_argnums=(1, 2))(
            on_cpu, activation, weight.group_size
        )
    groups = np.asarray(q, np.float64).reshape(m, scales.shape[1], -1)
    return (groups * np.asarray(scales, np.float64)[:, :, None]).reshape(m, -1)[:, :k]


def norms(seed: int) -> Lines:
    """One line per width and dtype of the norm; rows alone, together and in another program."""
    rng = np.random.default_rng(seed)
    lines = []
    for width, dtype in product((64, 576, 2048, 4096), ("bfloat16", "float32")):
        x = jnp.asarray(rng.normal(size=(ROWS[-1], width)) * 3, dtype)
        scale = jnp.asarray(rng.uniform(0.5, 2, width), dtype)
        case = {"check": "norms", "width": width, "dtype": dtype}
        lines.append(case | tried(partial(_check_norm, x, scale)))
    return lines


def _check_norm(x: jax.Array, scale: jax.Array) -> dict[str, Any]:
    """Compares norms with float64: the sum of squares costs 2^-20 at most, and the root less."""
    wide, scales = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-5) * scales
    y = np.asarray(rms_norm(x, scale, 1e-5))
    together = jax.jit(lambda x: rms_norm(x + x, scale, 1e-5) + 1)
    differ = [
        m for m in ROWS
        if (np.asarray(rms_norm(x[:m], scale, 1e-5)) != y[:m]).any()
        or (np.asarray(together(x[:m])) != np.asarray(together(x))[:m]).any()
    ]  # fmt: skip
    worst = float((np.abs(y - exact) / (np.abs(exact) * 2.0**-19 + 1e-30)).max())
    return {
        "error_of_bound": worst,
        "rows_that_differ": differ,
        "passed": worst <= 1 and not differ,
    }


# --- Exactness


def exactness(seed: int) -> Lines:
    """Compares QSpec with plain decoding on beginnings of texts that the model samples."""
    params = specjax.load("tiny")
    first = params.config.bos_id if params.config.bos_id is not None else params.config.pad_id
    sampled = specjax.decode(
        params, jnp.full((8, 1), first), max_new_tokens=31, drafter=specjax.Autoregressive(),
        sampling=specjax.Sampling(temperature=0.9), key=jax.random.key(seed), stop_tokens=(),
    )  # fmt: skip

    def run(drafter: specjax.Drafter) -> specjax.DecodeResult:
        return specjax.decode(
            params, sampled.tokens, max_new_tokens=96, drafter=drafter, stop_tokens=()
        )

    plain = np.asarray(run(specjax.Autoregressive()).tokens)

    def compared(case: tuple[Any, int]) -> dict[str, Any]:
        activation, length = case

        def check() -> dict[str, Any]:
            result = run(specjax.QSpec(draft_length=length, activation=activation))
            identical = int((np.asarray(result.tokens) == plain).all(axis=1).sum())
            return {
                "identical": identical, "acceptance_rate": float(result.stats.acceptance_rate),
                "passed": identical == len(plain),
            }  # fmt: skip

        return {
            "check": "exactness", "model": "tiny", "activation": activation,
            "draft_length": length, "outputs": len(plain), **tried(check),
        }  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilation takes most of the time
        return list(pool.map(compared, product(("a8", "a4"), (1, 3, 7))))


if __name__ == "__main__":
    sys.exit(main())
