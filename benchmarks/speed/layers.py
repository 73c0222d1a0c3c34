"""Compares layers in one stack with layers one by one: seconds to compile, and time of a pass.

The cache is as small as the format allows, so that the comparison is about how weights reach the
kernels.

    python -m benchmarks.speed.layers --json OUT
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.support.common import parser, table, write
from benchmarks.support.random_layers import random_layers
from specjax.model.kv_cache import KVCache
from specjax.model.params import unstack_layers
from specjax.model.transformer import forward


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--layers", type=int, nargs="+", default=[4, 16, 80])
    parse.add_argument("--hidden", type=int, default=512)
    parse.add_argument("--repeats", type=int, default=51)
    options = parse.parse_args()
    rows = []
    for count in options.layers:
        params = specjax.prepack(_random(count, options.hidden))
        variants = {"in one stack": params, "one by one": unstack_layers(params)}
        for name, each in _time(variants, options.repeats).items():
            rows.append({"hidden": options.hidden, "layers": count, "variant": name, **each})
    print(table(rows, list(rows[0])))
    write(options.json, rows)


def _time(variants: dict[str, specjax.Params], repeats: int) -> dict[str, dict[str, float]]:
    """Compiles `forward` for every variant, and then lets them take turns."""
    tokens = jnp.ones((1, 4), jnp.int32)
    compiled, taken = {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for name, params in variants.items():
        arguments = (params, tokens, jnp.arange(4)[None], KVCache.create(params.config, 1, 128))
        begin = time.perf_counter()
        program = jax.jit(forward).lower(*arguments).compile()
        taken[name] = time.perf_counter() - begin
        compiled[name] = (program, arguments)
    for _ in range(repeats + 1):
        for name, (program, arguments) in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds[name].append(time.perf_counter() - begin)
    return {
        name: {"compile_s": taken[name], "pass_ms": 1e3 * statistics.median(seconds[name][1:])}
        for name in variants
    }


def _random(layers: int, hidden: int) -> specjax.Params:
    """A model of random 4-bit layers."""
    config = specjax.ModelConfig(1024, hidden, 3 * hidden, layers, hidden // 64, 2, 64)
    rng = np.random.default_rng(0)
    embedding = jnp.asarray(rng.normal(size=(1024, hidden)), jnp.bfloat16)
    norm = jnp.ones(hidden, jnp.bfloat16)
    return specjax.Params(embedding, random_layers(rng, config), norm, None, config)


if __name__ == "__main__":
    main()
