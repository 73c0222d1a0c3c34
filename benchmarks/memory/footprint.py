"""Measures the time and memory of decoding, and that neither grows with the cache's capacity.

Memory: the bytes of the live arrays after a round, and of the temporaries of one round's program
and of the whole `decode` program, for QSpec and for plain decoding. Time: one round at cache
capacities of 256, 2048 and 16384 slots with the same context, and the number of programs compiled
while the loop runs. The exit status is 1 if QSpec's live bytes exceed plain decoding's by more than
1 %.

    python -m benchmarks.memory.footprint --json OUT
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax

import specjax
from benchmarks.support.common import parser, table, write
from specjax.generation.decoding import _decode, start
from specjax.generation.request import Request
from specjax.generation.rows import fitted, prompt_rows
from specjax.speculation.rounds import step

CAPACITIES = (256, 2048, 16384)
CONTEXT = 100
LIVE_BOUND = 1.01


def main() -> int:
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
    for capacity in CAPACITIES:
        plain = _measure(params, prompt, specjax.Autoregressive(), capacity, options.rounds)
        qspec = _measure(params, prompt, specjax.QSpec(), capacity, options.rounds)
        rows += [row | _ratio(row, plain) for row in (plain, qspec)]
    print(table(rows, list(rows[0])))
    _print_slowdown(rows)
    common = {"model": Path(options.model).name, "batch": options.batch}
    write(options.json, [common | row for row in rows])
    return int(any(row["live_ratio"] > LIVE_BOUND for row in rows))


def _ratio(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Live bytes over plain decoding's at the same capacity."""
    return {"live_ratio": row["live_bytes"] / plain["live_bytes"]}


def _measure(
    params: specjax.Params,
    prompt: list[list[int]],
    drafter: specjax.Drafter,
    slots: int,
    count: int,
) -> dict[str, Any]:
    """One row: `count` rounds of one drafter, and the programs compiled for it."""
    options = {
        "drafter": drafter, "max_new_tokens": 128, "stop_tokens": (), "cache_capacity": slots,
    }  # fmt: skip
    # Committed to its device, as a round leaves it: else JAX compiles the second round anew.
    state = jax.device_put(start(params, prompt, **options), jax.devices()[0])
    round_temporaries = _temporaries(step.lower(params, state, drafter))
    state = jax.block_until_ready(step(params, state, drafter))[0]
    compiled = _compilations()
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        state, output = jax.block_until_ready(step(params, state, drafter))
        seconds.append(time.perf_counter() - begin)
    output_bytes = _nbytes(output)
    del output  # its logits are for whoever asks; `decode` makes none
    row = {
        "drafter": type(drafter).__name__,
        "capacity": slots,
        "round_ms": 1e3 * statistics.median(seconds),
        "recompilations": _compilations() - compiled,
        "weight_bytes": params.nbytes,
        "state_bytes": _nbytes(state),
        "output_bytes": output_bytes,
        "live_bytes": sum(array.nbytes for array in jax.live_arrays()),
    }
    return row | {
        "round_temporary_bytes": round_temporaries,
        "decode_temporary_bytes": _temporaries(_lower_decode(params, prompt, options)),
    }


def _compilations() -> int:
    """Programs that JAX holds for a round."""
    return int(step._cache_size())  # type: ignore[attr-defined]


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _temporaries(lowered: jax.stages.Lowered) -> int:
    """Bytes of a program's temporaries, as the compiler plans them."""
    planned = lowered.compile().memory_analysis()
    assert planned is not None
    return int(planned.temp_size_in_bytes)


def _lower_decode(
    params: specjax.Params, prompt: list[list[int]], options: dict[str, Any]
) -> jax.stages.Lowered:
    """The whole program of `specjax.decode`. Its temporaries include the state and its cache."""
    request = Request.make(params, **options)
    return _decode.lower(params, *fitted(params, request, prompt_rows(params, request, prompt)))


def _print_slowdown(rows: list[dict[str, Any]]) -> None:
    """Prints the time of a round at the largest capacity over that at the smallest."""
    times = {(row["drafter"], row["capacity"]): row["round_ms"] for row in rows}
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        ratio = times[drafter, max(CAPACITIES)] / times[drafter, min(CAPACITIES)]
        print(f"{drafter}: time per round, largest over smallest capacity: {ratio:.2f}")


if __name__ == "__main__":
    sys.exit(main())
