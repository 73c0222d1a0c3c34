"""Measures tokens per second of QSpec and of plain decoding on the same kernels and prompts.

Drafters take turns, so that a busy machine slows all of them. The script reports medians, and the
ratio to plain decoding. Compilation is not counted.

    python -m benchmarks.speed.qspec --json OUT
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import jax

import specjax
from benchmarks.support.common import pad, parser, table, text_prompts, write

DRAFTERS = (
    specjax.Autoregressive(),
    specjax.QSpec(draft_length=3, activation="a8"),
    specjax.QSpec(draft_length=7, activation="a8"),
    specjax.QSpec(draft_length=3, activation="a4"),
)


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--model", default="tiny")
    parse.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parse.add_argument("--max-new-tokens", type=int, default=128)
    parse.add_argument("--repeats", type=int, default=7)
    options = parse.parse_args()
    params = specjax.load(options.model)
    tokenizer = specjax.load_tokenizer(options.model)
    rows = []
    for batch in options.batch:
        texts = text_prompts(options.data, "arithmetic", batch)
        ids = [tokenizer.encode(text)[:128] for text in texts]
        rows += _measure(params, ids, options)
    print(table(rows, list(rows[0])))
    write(options.json, [{"model": Path(options.model).name, **row} for row in rows])


def _measure(params: specjax.Params, ids: list[list[int]], options: Any) -> list[dict[str, Any]]:
    """One row per drafter."""
    tokens, lengths = pad(ids, 128)

    def run(drafter: specjax.Drafter) -> tuple[float, specjax.DecodeResult]:
        begin = time.perf_counter()
        result = specjax.decode(
            params, tokens, prompt_lengths=lengths, drafter=drafter, stop_tokens=(),
            max_new_tokens=options.max_new_tokens,
        )  # fmt: skip
        jax.block_until_ready(result)
        return time.perf_counter() - begin, result

    results = [run(drafter)[1] for drafter in DRAFTERS]
    turns = [[run(drafter)[0] for drafter in DRAFTERS] for _ in range(options.repeats)]
    medians = [statistics.median(times) for times in zip(*turns, strict=True)]
    return [
        {
            "drafter": repr(drafter),
            "batch": len(ids),
            "tokens_per_second": len(ids) * options.max_new_tokens / median,
            "ratio": medians[0] / median,
            "tokens_per_round": float(result.stats.tokens_per_round),
        }
        for drafter, median, result in zip(DRAFTERS, medians, results, strict=True)
    ]


if __name__ == "__main__":
    main()
