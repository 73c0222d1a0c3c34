"""Compares layers unrolled (as in the library) with layers under `lax.scan`: compile and run time.

The scanned variant stacks the layers' weights and slices one layer out per iteration. The cache is
as small as the format allows, so that the comparison is about how weights reach the kernels.

    python -m benchmarks.speed.layers --json OUT
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.support.common import parser, table, write
from pallas_kernels.formats import int4_from_integers
from specjax.model.kv_cache import KVCache
from specjax.model.params import Layer, Linear, linear_shapes
from specjax.model.transformer import (
    block,
    linear,
    norm,
    pass_context,
)
from specjax.model.transformer import forward as unrolled


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--layers", type=int, nargs="+", default=[4, 16, 32])
    parse.add_argument("--hidden", type=int, default=512)
    parse.add_argument("--repeats", type=int, default=15)
    options = parse.parse_args()
    rows = []
    for count in options.layers:
        params = _random(count, options.hidden)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.layers)
        for name, function, extra in (("unrolled", unrolled, ()), ("scan", _scanned, (stacked,))):
            rows.append(
                {"variant": name, "layers": count, **_time(function, params, extra, options)}
            )
    print(table(rows, list(rows[0])))
    write(options.json, [{"hidden": options.hidden, **row} for row in rows])


def _scanned(
    params: specjax.Params,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    stacked: Layer,
) -> tuple[jax.Array, KVCache]:
    """`forward` with the blocks under one scan."""
    config = params.config
    context = pass_context(config, positions)

    def one(x: jax.Array, layer_and_cache: Any) -> tuple[jax.Array, Any]:
        layer, keys, values = layer_and_cache
        own = KVCache((keys,), (values,), cache.lengths)
        x, own, _ = block(layer, 0, x, own, context)
        return x, (own.keys[0], own.values[0])

    x = params.embedding[tokens]
    caches = (jnp.stack(cache.keys), jnp.stack(cache.values))
    x, caches = jax.lax.scan(one, x, (stacked, *caches))
    x = norm(x, params.final_norm, config, x.dtype)
    logits = linear(x, params.head, "a16")
    return logits, KVCache(tuple(caches[0]), tuple(caches[1]), cache.lengths)


def _time(
    function: Callable, params: specjax.Params, extra: tuple[Any, ...], options: Any
) -> dict[str, float]:
    cache = KVCache.create(params.config, 1, 128)
    tokens = jnp.ones((1, 4), jnp.int32)
    arguments = (params, tokens, jnp.arange(4)[None], cache, *extra)
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = [time.perf_counter() - begin]
    for _ in range(options.repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - begin)
    return {"compile_s": seconds[0], "pass_ms": 1e3 * statistics.median(seconds[2:])}


def _random(layers: int, hidden: int) -> specjax.Params:
    """A 4-bit model of random integers."""
    config = specjax.ModelConfig(1024, hidden, 3 * hidden, layers, hidden // 64, 2, 64)
    rng = np.random.default_rng(0)

    def quantized(n: int, k: int) -> Linear:
        q = jnp.asarray(rng.integers(-7, 8, (n, k)), jnp.int8)
        return Linear(int4_from_integers(q, jnp.full((n, k // 128), 0.01, jnp.bfloat16)))

    ones = jnp.ones(hidden, jnp.bfloat16)
    blocks = tuple(
        Layer(
            attention_norm=ones,
            mlp_norm=ones,
            **{name: quantized(*shape) for name, shape in linear_shapes(config).items()},
        )
        for _ in range(layers)
    )
    embedding = jnp.asarray(rng.normal(size=(1024, hidden)), jnp.bfloat16)
    return specjax.Params(embedding, blocks, ones, None, config)


if __name__ == "__main__":
    main()
