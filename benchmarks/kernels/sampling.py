"""Times the choice of a token from logits, beside a sort and one random number per token.

The vocabularies are those of Llama 2, Llama 3 and Qwen 2.5.

    python -m benchmarks.kernels.sampling --json OUT
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.support.common import parser, table, write
from specjax import Sampling
from specjax.speculation.sampling import draw, probabilities, uniform_pairs

VOCABULARIES = {"Llama 2": 32_000, "Llama 3": 128_256, "Qwen 2.5": 151_936}
ROWS = (1, 8)
TURNS = 9


def main() -> None:
    options = parser(__doc__).parse_args()
    rows = [
        {"model": model, "vocabulary": size, "rows": count, **measure(count, size)}
        for model, size in VOCABULARIES.items()
        for count in ROWS
    ]
    print(table(rows, list(rows[0])))
    write(options.json, rows)


def measure(rows: int, size: int) -> dict[str, float]:
    """Milliseconds of every step, for all rows."""
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, size))
    keys = jax.random.split(jax.random.key(1), rows)
    distribution = jax.nn.softmax(logits)
    steps: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]] = {
        "temperature": (partial(probabilities, sampling=Sampling(temperature=0.7)), (logits,)),
        "top-k": (partial(probabilities, sampling=Sampling(top_k=50)), (logits,)),
        "top-p": (partial(probabilities, sampling=Sampling(top_p=0.9)), (logits,)),
        "min-p": (partial(probabilities, sampling=Sampling(min_p=0.05)), (logits,)),
        "draw": (lambda keys, p: draw(uniform_pairs(keys), p), (keys, distribution)),
        "jnp.sort": (jnp.sort, (logits,)),
        "jax.random.categorical": (jax.vmap(jax.random.categorical), (keys, logits)),
    }
    return {name: milliseconds(*step) for name, step in steps.items()}


def milliseconds(function: Callable[..., Any], arguments: tuple[jax.Array, ...]) -> float:
    """Median over TURNS, after one call that compiles."""
    compiled = jax.jit(function)
    times = []
    for _ in range(TURNS + 1):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[1:])


if __name__ == "__main__":
    main()
