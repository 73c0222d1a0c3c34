"""Checks on the machine's accelerator that layers run together have the bits of layers one by one.

`benchmarks.gpu_check` runs it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.support.checks import tried
from benchmarks.support.widen import widen
from pallas_kernels.activations import Activation
from specjax.model.kv_cache import KVCache
from specjax.model.params import unstack_layers
from specjax.model.transformer import forward

SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_heads": 16, "num_kv_heads": 4}
METHODS: dict[str, Callable[[specjax.Params], specjax.Params]] = {
    "bfloat16": lambda params: params,
    "nested16": lambda params: specjax.quantize(params, "nested16"),
    "nested8": lambda params: specjax.quantize(params, "nested8"),
    "4 bits": lambda params: specjax.quantize(params, "rtn"),
    "mxfp4": lambda params: specjax.quantize(params, "mxfp4"),
}
LAYERS, SLOTS = (0, 1), 1024  # two segments of attention
ROWS, TOKENS = (1, 5, 80), 3  # 3 to 240 rows of a product: a kernel that adds segments, and none


def lines(seed: int) -> list[dict[str, Any]]:
    """One line per form of the weights and activation precision."""
    wide = widen(specjax.load("tiny-16bit"), **SIZES)
    cases: list[tuple[str, specjax.Params, Activation]] = []
    for name, method in METHODS.items():
        params = method(wide)
        cases += [(name, params, each) for each in ("a16", *["a8"] * params.quantized)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilation takes most of the time
        return list(pool.map(lambda case: _checked(seed, *case), cases))


def _checked(
    seed: int, name: str, params: specjax.Params, activation: Activation
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(3, 4096, (ROWS[-1], TOKENS)), jnp.int32)
    lengths = jnp.asarray(rng.integers(0, SLOTS - TOKENS, ROWS[-1]), jnp.int32)
    cache = KVCache.create(params.config, ROWS[-1], SLOTS)
    filled = jax.tree.map(
        lambda part: jnp.asarray(rng.normal(size=part.shape), jnp.bfloat16).view(part.dtype),
        (cache.keys[:1], cache.values[:1]),
    )

    def run(params: specjax.Params, rows: int) -> list[np.ndarray]:
        cache = KVCache.create(params.config, rows, SLOTS).with_lengths(lengths[:rows])
        keys, values = (jnp.broadcast_to(part, cache.keys.shape) for part in filled)
        cache = dataclasses.replace(cache, keys=keys, values=values)
        positions = cache.lengths[:, None] + jnp.arange(TOKENS)
        logits, after = jax.jit(forward, static_argnames=("activation", "layers"))(
            params, tokens[:rows], positions, cache, activation=activation, layers=LAYERS
        )
        return [np.asarray(each) for each in (logits, after.keys, after.values)]

    def check() -> dict[str, Any]:
        whole = run(params, ROWS[-1])
        fewer = [rows for rows in ROWS[:-1] if not _same(run(params, rows), whole, rows)]
        apart = _same(run(unstack_layers(params), ROWS[1]), whole, ROWS[1])
        finite = bool(np.isfinite(whole[0]).all())
        passed = apart and finite and not fewer
        return {"one_by_one": apart, "rows_that_differ": fewer, "passed": passed}

    return {"check": "layers", "weight": name, "activation": activation, **tried(check)}


def _same(some: list[np.ndarray], whole: list[np.ndarray], rows: int) -> bool:
    """Whether a pass over fewer rows has the bits of the whole one."""
    return all(
        (one.view(np.uint8) == other[:rows].view(np.uint8)).all()
        for one, other in zip(some, whole, strict=True)
    )
