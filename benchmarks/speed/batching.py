"""Checks the outputs of continuous batching, and measures its gain over static batching.

Real prompts of mixed length (GSM8K, HumanEval, MT-Bench) go through a number of rows. Answers end
at a line break, so their lengths differ. Every output is compared with plain decoding of its prompt
alone. Static batching decodes as many prompts at a time and starts the next ones when the last has
ended. Both are compiled first and then take turns. Tokens per second are medians and count
generated tokens.

    python -m benchmarks.speed.batching --json OUT [--rows 8 16 32]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.support.common import pad, parser, table, text_prompts, write
from specjax.generation.batching import Progress, complete
from specjax.model.transformer import CHUNK

KINDS = ("arithmetic", "python", "chat")
COMPILED = "/jax/core/compile/backend_compile_duration"


def main() -> int:
    options = _options()
    params = specjax.load(options.model)
    tokenizer = specjax.load_tokenizer(options.model)
    texts = [text for kind in KINDS for text in text_prompts(options.data, kind, options.prompts)]
    order = np.random.default_rng(0).permutation(len(texts))[: options.prompts]
    prompts = [tokenizer.encode(texts[i])[: options.max_prompt] for i in order]
    stops = (*params.config.stop_tokens, *tokenizer.encode("\n", special_tokens=False))
    settings = {"max_new_tokens": options.max_new_tokens, "stop_tokens": stops}
    drafters = {"plain": specjax.Autoregressive(), "QSpec": specjax.QSpec(3)}
    alone = _alone(params, prompts, settings)
    rows = [
        _compare(params, prompts, alone, drafter, count, settings, options.repeats)
        | {"drafter": name}
        for name, drafter in drafters.items()
        for count in options.rows
    ]
    columns = ["drafter", *(name for name in rows[0] if name != "drafter")]
    print(table(rows, columns))
    write(options.json, [{"model": options.model, **row} for row in rows])
    return int(any(row["differing"] for row in rows))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny")
    add("--prompts", type=int, default=500)
    add("--rows", type=int, nargs="+", default=[8, 16, 32])
    add("--max-prompt", type=int, default=384, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=96)
    add("--repeats", type=int, default=3)
    return parse.parse_args()


def _alone(
    params: specjax.Params, prompts: Sequence[list[int]], settings: dict[str, Any]
) -> list[np.ndarray]:
    """The output of plain decoding for every prompt alone."""
    plain = specjax.Autoregressive()
    return [row for prompt in prompts for row in _static(params, [prompt], plain, 1, settings)]


def _static(
    params: specjax.Params,
    prompts: Sequence[list[int]],
    drafter: specjax.Drafter,
    rows: int,
    settings: dict[str, Any],
) -> list[np.ndarray]:
    """Static batching: as many prompts at a time as there are rows, each batch to its end."""
    outputs: list[np.ndarray] = []
    for first in range(0, len(prompts), rows):
        chunk = list(prompts[first : first + rows])
        width = -(-max(map(len, chunk)) // CHUNK) * CHUNK
        tokens, lengths = pad(chunk + chunk[:1] * (rows - len(chunk)), width)
        result = specjax.decode(params, tokens, prompt_lengths=lengths, drafter=drafter, **settings)
        written, ends = np.asarray(result.tokens), np.asarray(result.lengths)
        outputs += [written[i, : ends[i]] for i in range(len(chunk))]
    return outputs


def _compare(
    params: specjax.Params,
    prompts: Sequence[list[int]],
    alone: Sequence[np.ndarray],
    drafter: specjax.Drafter,
    rows: int,
    settings: dict[str, Any],
    repeats: int,
) -> dict[str, Any]:
    """One row of the table."""
    busy: list[Progress] = []

    def watch(progress: Progress) -> None:
        if progress.total - progress.done > rows:  # prompts wait
            busy[:] = [progress]

    def continuous() -> list[np.ndarray]:
        done = dict(
            complete(params, prompts, drafter=drafter, rows=rows, progress=watch, **settings)
        )
        return [done[i].tokens for i in range(len(prompts))]

    def static() -> list[np.ndarray]:
        return _static(params, prompts, drafter, rows, settings)

    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if event == COMPILED else None
    )
    found = continuous()
    compiled = len(compilations)
    continuous()
    again = len(compilations) - compiled
    jax.monitoring.clear_event_listeners()
    static()
    turns = [(_seconds(continuous), _seconds(static)) for _ in range(repeats)]
    ours, theirs = (statistics.median(column) for column in zip(*turns, strict=True))
    generated = sum(len(out) - len(prompt) for out, prompt in zip(found, prompts, strict=True))
    return {
        "rows": rows,
        "prompts": len(prompts),
        "differing": sum(not np.array_equal(a, b) for a, b in zip(found, alone, strict=True)),
        "useful_row_rounds": busy[0].useful_rounds / busy[0].row_rounds if busy else None,
        "compilations": compiled,
        "compilations_again": again,
        "tokens": generated,
        "continuous_tokens_per_second": generated / ours,
        "static_tokens_per_second": generated / theirs,
        "ratio": theirs / ours,
    }


def _seconds(run: Any) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
