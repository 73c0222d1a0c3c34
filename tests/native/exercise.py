"""Calls every handler of the C++ library, on arrays that end in the middle of a vector.

A program of its own, because `tests/kernels/test_sanitizers.py` runs it over a library built with
sanitizers, which end the process at the first byte read or written out of bounds. Every array is
an allocation of its own, of its exact size. Other tests check the results.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.cache_entries import quantize_entries
from pallas_kernels.cpu import probe
from pallas_kernels.cpu.native import instruction_sets
from pallas_kernels.formats import Quantized
from pallas_kernels.hadamard import hadamard
from pallas_kernels.interleave import interleave
from pallas_kernels.norms import rms_norm
from pallas_kernels.rope import rotate
from pallas_kernels.swiglu import swiglu
from tests.kernels.test_cpu_attention import CASES, run
from tests.kernels.test_ffi_errors import REFUSED
from tests.model.test_layer_stack import FORMS, passes
from tests.support.random_weights import random_rows, random_weights

# M, N, K: one of everything; few rows and many; more than share one decoded panel.
SHAPES = ((1, 1, 1), (4, 67, 300), (19, 67, 300), (101, 37, 130))


def matmuls(instruction_set: str) -> None:
    """All formats in one call, which share what is prepared of x."""
    for m, n, k in SHAPES:
        weights = random_weights(n, k)
        del weights["int4-outliers"]  # two products, taken apart before the library is called
        weights |= {f"{name}-interleaved": interleave(w) for name, w in weights.items()}
        quantized = tuple(w for w in weights.values() if isinstance(w, Quantized))
        for dtype in ("float32", "bfloat16"):
            x = random_rows(m, k, dtype).at[0, 0].set(jnp.nan).at[-1, -1].set(jnp.inf)
            for activation in ("a16", "a8", "a4"):
                chosen = tuple(weights.values()) if activation == "a16" else quantized
                jax.block_until_ready(
                    cpu.matmul(x, chosen, activation=activation, instruction_set=instruction_set)
                )


def attentions(instruction_set: str) -> None:
    """The cases that are tested against float64, and lengths and positions that no cache has."""
    for case in CASES.values():
        run(case, instruction_set)
        for length in (-(2**31), -1, 2**31 - 1):
            run(case, instruction_set, lengths=jnp.full_like(case["lengths"], length))
    for name, bits in (("float32", 4), ("tree-window", 4), ("chain", 8), ("one-feature", 8)):
        case = CASES[name]
        codes = {each: quantize_entries(case[each], bits) for each in ("keys", "values")}
        run(case, instruction_set, **codes)
    case = CASES["tree-window"]
    positions = jnp.full_like(case["positions"], -(2**31))
    run(case, instruction_set, positions=positions, window=2**63 - 1)
    for node in (-(2**31), 2**31 - 1):
        run(case, instruction_set, ancestors=jnp.full_like(case["ancestors"], node))
    run(case, instruction_set, ancestors=case["ancestors"][:, :, :0])


def whole_layers() -> None:
    """Trees and chains through all layers, also where the cache ends."""
    # The narrow one comes first, because a thread keeps the memory of wider ones.
    names = "a narrow MLP", "4 bits", "nested16", "float32", "a window", "biases and norms of heads"
    for name in names:
        jax.block_until_ready(passes(FORMS[name](), "a16", tree=name != "float32"))


def others() -> None:
    """Norms, rotations, gates and the probes, which have one instruction set."""
    for width in (1, 24, 104, 1001):
        x = random_rows(3, width, "float32")
        jax.block_until_ready((hadamard(x), hadamard(x.T, 0)))
        for dtype in (jnp.float32, jnp.bfloat16):
            angles = random_rows(3, width, "float32")
            heads = random_rows(3, 10 * width, "float32").reshape(3, 5, 2 * width)
            jax.block_until_ready(rms_norm(x, jnp.ones(width), 1e-5, dtype))
            jax.block_until_ready(rotate(heads, angles, angles, dtype))
            jax.block_until_ready(swiglu(x, x, dtype))
    probe.read_bandwidth(jnp.zeros(10**6, jnp.uint8))
    for arithmetic in probe.ARITHMETICS:
        probe.peak(arithmetic, count=2)


def refusals() -> None:
    """The calls that are refused, which must not have been begun."""
    for call, changes, _ in REFUSED:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            call.run(changes)


if __name__ == "__main__":
    for name in instruction_sets():
        matmuls(name)
        attentions(name)
    whole_layers()
    others()
    refusals()
    print("done")
