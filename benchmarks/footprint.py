"""What a decode step costs in time and memory, and what it does not depend on.

Memory: bytes of the live arrays and of the compiled program's temporaries, QSpec beside plain
decoding. Time: one round at cache capacities of 256, 2048 and 16384 slots with the same context;
and the number of programs compiled while the loop runs.

    python -m benchmarks.footprint --json benchmarks/results/footprint.json
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax

import specjax
from benchmarks.common import parser, table, write
from specjax.decoding import start, step

CAPACITIES = (256, 2048, 16384)
CONTEXT = 100


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--model", default="tiny")
    parse.add_argument("--batch", type=int, default=8)
    parse.add_argument("--rounds", type=int, default=15)
    options = parse.parse_args()
    params = specjax.load(options.model)
    longest = dataclasses.replace(params.config, max_position_embeddings=2 * max(CAPACITIES))
    params = dataclasses.replace(params, config=longest)
    prompt = [[1 + row] * CONTEXT for row in range(options.batch)]
    rows = []
    for drafter in (specjax.Autoregressive(), specjax.QSpec()):
        for capacity in CAPACITIES:
            rows.append(_measure(params, prompt, drafter, capacity, options.rounds))
    print(table(rows, list(rows[0])))
    write(options.json, [{"model": options.model, "batch": options.batch, **row} for row in rows])


def _measure(
    params: specjax.Params,
    prompt: list[list[int]],
    drafter: specjax.Drafter,
    slots: int,
    count: int,
) -> dict[str, Any]:
    options = {"max_new_tokens": 128, "stop_tokens": (), "cache_capacity": slots}
    state = start(params, prompt, drafter=drafter, **options)
    temporaries = step.lower(params, state, drafter).compile().memory_analysis().temp_size_in_bytes
    state, _ = jax.block_until_ready(step(params, state, drafter))
    compiled = step._cache_size()
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(params, state, drafter))
        seconds.append(time.perf_counter() - begin)
    return {
        "drafter": type(drafter).__name__,
        "capacity": slots,
        "round_ms": 1e3 * statistics.median(seconds),
        "recompilations": step._cache_size() - compiled,
        "weight_bytes": params.nbytes,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "live_bytes": sum(array.nbytes for array in jax.live_arrays()),
        "temporary_bytes": temporaries,
    }


if __name__ == "__main__":
    main()
