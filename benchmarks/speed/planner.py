"""Compares the speed-ups that the planner predicts with measured ones.

Each kind of drafter is measured once (`specjax.planning.measure`: acceptance and pass times at its
longest drafts). The formula then predicts other draft lengths, and each of these decodes the same
prompts. Drafters and plain decoding take turns, and the passes over the prompts are not counted.
The measured speed-up is the ratio of the times for all prompts, each the median over the turns. The
exit status is 1 if a prediction is off by more than 10 %.

    python -m benchmarks.speed.planner --json OUT [--model DIR] [--draft DIR]

`--widen` widens the models to a billion parameters (`benchmarks.support.widen`), so that a pass
costs far more than starting it.

With `--target` the model is SmolLM2, as "gguf" (4 bits) or "nested16", and drafts for itself
(QSpec), on prompts of five kinds. The rows say where that pays, by draft length and batch size.

    python -m benchmarks.speed.planner --target nested16 --batch 1 4 8 --prompts 40 --json OUT
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.support import instruct
from benchmarks.support.common import pad, parser, table, text_prompts, write
from benchmarks.support.rounds import finish
from benchmarks.support.widen import DRAFT, LARGE, widen
from specjax import planning
from specjax.generation.decoding import start

BOUND = 0.1
LENGTHS = {  # per kind: the first is measured, the others are predicted
    "mxfp4 cast": ((8,), (2,), (4,), (6,)),
    "int8 cast": ((8,), (2,), (4,)),
    "half the layers": ((4,), (1,), (2,)),
    "two levels": ((8, 3), (4, 2), (6, 2), (6, 3)),
}
OWN = "its own draft"  # QSpec, of a model that has a cheap reading
OWN_LENGTHS = ((6,), (1,), (2,), (3,), (4,), (6,))


def main() -> int:
    options = _options()
    params, prompts = _subject(options)
    for batch in options.batch:
        if len(prompts) % batch:
            raise ValueError(f"--batch must divide the {len(prompts)} prompts, got {batch}")
    kinds = options.kinds if options.target is None else [OWN]
    rows = [
        row for batch in options.batch for row in _compared(params, prompts, kinds, batch, options)
    ]
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return int(any(abs(row["error"]) > BOUND for row in rows))


def _subject(options: Any) -> tuple[specjax.Params, list[list[int]]]:
    """The target and the prompts."""
    if options.target is not None:
        count = options.prompts // len(instruct.KINDS)
        found = instruct.prompts(options.data, count, options.max_prompt)
        return instruct.target(options.target), [ids for _, ids in found]
    params = specjax.load(options.model)
    if options.widen:
        params = widen(params, **LARGE)
    tokenizer = specjax.load_tokenizer(options.model)
    texts = text_prompts(options.data, "arithmetic", options.prompts)
    return params, [tokenizer.encode(text)[: options.max_prompt] for text in texts]


def _compared(
    params: specjax.Params, prompts: list[list[int]], kinds: list[str], batch: int, options: Any
) -> list[dict[str, Any]]:
    """The rows of one batch size."""
    name = Path(options.model).name + (", widened" if options.widen else "")
    if options.target is not None:
        name = f"{instruct.MODEL}, {options.target}"
    predicted: dict[str, dict[str, float]] = {}
    measured: dict[str, dict[str, float]] = {}
    for kind in kinds:
        longest, *others = LENGTHS.get(kind, OWN_LENGTHS)
        first = _drafter(kind, longest, params, options)
        tokens = options.max_new_tokens
        found = planning.measure(params, first, prompts, rows=batch, max_new_tokens=tokens)
        drafters: dict[str, specjax.Drafter] = {"plain": specjax.Autoregressive()}
        for lengths in others:
            drafter = f"{kind}, {'+'.join(map(str, lengths))}"
            drafters[drafter] = _with_lengths(first, lengths)
            levels = [
                dataclasses.replace(level, draft_length=n)
                for level, n in zip(found.levels, lengths, strict=True)
            ]
            rounds = planning.expected_rounds(tokens, levels[0].acceptance, lengths[0])
            predicted[drafter] = {
                "draft_length": lengths[0],
                "acceptance": levels[0].acceptance,
                "predicted_tokens": tokens / rounds,
                "predicted": planning.speedup(levels, found.draft_cost, tokens),
            }
        # At once, before the machine changes.
        measured |= _measure(params, prompts, drafters, batch, options)
    return [
        {
            "model": name,
            "batch": batch,
            "drafter": drafter,
            **values,
            **measured[drafter],
            "error": values["predicted"] / measured[drafter]["measured"] - 1,
        }
        for drafter, values in predicted.items()
    ]


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny-16bit", help="a 16-bit model")
    add("--draft", help="a small model for the last level; default: half the layers")
    add("--widen", action="store_true", help="widen the models to a billion parameters")
    add("--kinds", nargs="+", default=[*LENGTHS], choices=[*LENGTHS])
    add(
        "--target",
        choices=("gguf", "nested16"),
        help="SmolLM2 like this, in place of --model and --kinds",
    )
    add("--batch", type=int, nargs="+", default=[1])
    add("--prompts", type=int, default=8, help="number of prompts, a multiple of the batch")
    add("--max-prompt", type=int, default=96)
    add("--max-new-tokens", type=int, default=96)
    add("--repeats", type=int, default=3)
    return parse.parse_args()


def _drafter(
    kind: str, lengths: tuple[int, ...], params: specjax.Params, options: Any
) -> specjax.Drafter:
    """A drafter of the kind."""
    if kind == OWN:
        return specjax.QSpec(lengths[0], "a8")
    half = specjax.LayerSkip(tuple(range((params.config.num_layers + 1) // 2)), lengths[-1])
    if kind == "half the layers":
        return half
    method = "int8" if kind == "int8 cast" else "mxfp4"
    cast = specjax.quantize(params, method, lm_head=True)
    outer = specjax.DraftModel(cast, lengths[0], share_cache=True)
    if kind != "two levels":
        return outer
    if options.draft is None:
        return specjax.MultiLevel(outer, half)
    small = specjax.load(options.draft)
    if options.widen:
        small = widen(small, **DRAFT | {"vocab_size": LARGE["vocab_size"]})
    small = specjax.quantize(small, "mxfp4", lm_head=True)
    return specjax.MultiLevel(outer, specjax.DraftModel(small, lengths[1]))


def _with_lengths(drafter: Any, lengths: tuple[int, ...]) -> specjax.Drafter:
    """The drafter with other draft lengths, one per level."""
    if isinstance(drafter, specjax.MultiLevel):
        outer = dataclasses.replace(drafter.outer, draft_length=lengths[0])
        return specjax.MultiLevel(outer, _with_lengths(drafter.inner, lengths[1:]))
    return dataclasses.replace(drafter, draft_length=lengths[0])


_run = jax.jit(finish, donate_argnames="state")


def _measure(
    params: specjax.Params,
    prompts: list[list[int]],
    drafters: dict[str, specjax.Drafter],
    batch: int,
    options: Any,
) -> dict[str, dict[str, float]]:
    """The speed-up of every drafter over the one named "plain", and its tokens per round."""
    width = max(map(len, prompts))

    def run(drafter: specjax.Drafter, first: int) -> tuple[float, np.ndarray]:
        """The seconds, tokens and rounds of some prompts."""
        tokens, lengths = pad(prompts[first : first + batch], width)
        state = start(
            params, tokens, prompt_lengths=lengths, drafter=drafter,
            max_new_tokens=options.max_new_tokens, stop_tokens=(),
        )  # fmt: skip
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state = jax.block_until_ready(_run(params, state, drafter))
        seconds = time.perf_counter() - begin
        return seconds, np.array([state.stats.generated.sum(), state.stats.rounds.sum()])

    for drafter in drafters.values():
        run(drafter, 0)  # compiles
    seconds = dict.fromkeys(drafters, 0.0)
    counts = {name: np.zeros(2) for name in drafters}
    for first in range(0, len(prompts), batch):
        turns = [
            {name: run(drafter, first) for name, drafter in drafters.items()}
            for _ in range(options.repeats)
        ]
        for name in drafters:
            seconds[name] += statistics.median(turn[name][0] for turn in turns)
            counts[name] += turns[0][name][1]
    return {
        name: {
            "measured_tokens": float(counts[name][0] / counts[name][1]),
            "measured": seconds["plain"] / seconds[name],
        }
        for name in drafters
    }


if __name__ == "__main__":
    sys.exit(main())
