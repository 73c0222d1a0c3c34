"""Measures tokens per second of drafters on a model of a billion parameters.

The models are the small trained ones, widened (`benchmarks.support.widen`): real text, real
acceptance, and the cost of the large shape. Drafters take turns, so that a busy machine slows all
of them. The script reports medians, and the ratio to plain decoding on the same kernels. It times
the loop, after compilation and with the prompt in the caches. Every output is compared with plain
decoding's.

    python -m benchmarks.speed.drafters --draft runs/draft/hf --json OUT
    python -m benchmarks.speed.drafters --draft runs/draft/hf --without-model --json OUT
    python -m benchmarks.speed.drafters --draft runs/draft/hf --lengths 12 --json OUT

The second form compares drafters without a model, alone and below a cast. The third measures the
MXFP4 cast alone: constant draft lengths 1 to 12, and the two schedules with a maximum of 12. The
adaptive schedule gets its cost from lengths 1 and 12, which are measured first.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.support.common import pad, parser, table, text_prompts, write
from benchmarks.support.drafter_table import model_drafters
from benchmarks.support.rounds import finish
from benchmarks.support.widen import DRAFT, LARGE, layer_blocks, widen
from specjax import (
    Adaptive,
    Autoregressive,
    DraftModel,
    Heuristic,
    LayerSkip,
    MultiLevel,
    Params,
)
from specjax.generation.decoding import start
from specjax.speculation.state import DecodeState, Stats

KINDS = ("arithmetic", "python", "prose")
COMPARED = (
    "small model", "small model, MXFP4", "MXFP4 cast", "MXFP4 cast, a8", "MXFP4 cast, own cache",
    "MXFP4 cast, 16-bit head", "INT4 cast, a8", "layer skip", "two levels", "two levels, MXFP4 a8",
    "two levels, INT4 a8",
)  # fmt: skip
PLAIN = Autoregressive()
ROOM = 24  # cache slots for the longest draft


class Case(NamedTuple):
    """A drafter for a target, and the name of the plain case with the same text."""

    target: Params
    drafter: specjax.Drafter
    plain: str


Cases = dict[str, Case]


def main() -> None:
    options = _options()
    small = specjax.load(options.model)
    target = widen(small, **LARGE | {"vocab_size": options.vocab})
    prompts = list(_prompts(options))
    if options.lengths:
        rows = measure_lengths(target, prompts, options)
    else:
        draft = widen(specjax.load(options.draft), **DRAFT | {"vocab_size": options.vocab})
        layers = layer_blocks(options.layers, small.config, target.config)
        cases = (
            text_cases(target, options)
            if options.without_model
            else compared_cases(target, draft, LayerSkip(layers, 3), options)
        )
        rows = [row for batch in options.batch for row in measure(cases, prompts, batch, options)]
    print(table(rows, list(dict.fromkeys(name for row in rows for name in row))))
    write(options.json, rows)


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny-16bit", help="the model that is widened to the target")
    add("--draft", required=True, help="the small model that drafts, widened likewise")
    add("--vocab", type=int, default=LARGE["vocab_size"], help="tokens of the large models")
    add("--layers", type=int, nargs="+", default=[0, 1, 2, 4, 5], help="small layers not skipped")
    add("--small-length", type=int, default=4, help="tokens per draft of the small model")
    add("--cast-length", type=int, default=5, help="tokens per draft of a cast")
    add("--levels-length", type=int, default=8, help="tokens per draft of two levels")
    add("--below-length", type=int, default=2, help="tokens that the small model drafts at a time")
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--without-model", action="store_true", help="compare drafters without a model instead")
    add("--lengths", type=int, help="compare draft lengths up to this one instead, at batch 1")
    add("--prompts", type=int, default=3, help="real prompts at batch 1, the kinds in turn")
    add("--max-prompt", type=int, default=96, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=48)
    add("--repeats", type=int, default=3)
    return parse.parse_args()


def _prompts(options: Any) -> Iterator[list[int]]:
    """Real prompts, the kinds in turn."""
    tokenizer = specjax.load_tokenizer(options.model)
    count = -(-max(options.prompts, *options.batch) // len(KINDS))
    for texts in zip(*(text_prompts(options.data, kind, count) for kind in KINDS), strict=True):
        yield from (tokenizer.encode(text)[: options.max_prompt] for text in texts)


def compared_cases(target: Params, draft: Params, skip: LayerSkip, options: Any) -> Cases:
    """The drafters of the 16-bit target, and QSpec on a 4-bit one."""
    names = ("small_length", "cast_length", "levels_length", "below_length")
    lengths = {name: getattr(options, name) for name in names}
    drafters = model_drafters(target, draft, skip, **lengths)
    chosen = {name: Case(target, drafters[name], "plain") for name in COMPARED}
    integers = specjax.quantize(target, "rtn", lm_head=True)
    return {
        "plain": Case(target, PLAIN, "plain"),
        **chosen,
        "plain, 4-bit target": Case(integers, PLAIN, "plain, 4-bit target"),
        "QSpec, 4-bit target": Case(integers, specjax.QSpec(3), "plain, 4-bit target"),
    }


def text_cases(target: Params, options: Any) -> Cases:
    """Drafters without a model, with drafts short enough to pay on a CPU."""
    small = specjax.Spectra(window=2, guesses=2)
    cast = specjax.quantize(target, "mxfp4", lm_head=True)
    shared = DraftModel(cast, options.levels_length, "a8", share_cache=True)
    drafters = {
        "prompt lookup": specjax.PromptLookup(options.cast_length),
        "ANPD": specjax.NGram(options.cast_length),
        "Lookahead, W = G = 2": specjax.Lookahead(window=2, guesses=2),
        "CORE, W = G = 2": small,
        "MXFP4 cast, a8": dataclasses.replace(shared, draft_length=options.cast_length),
        "MXFP4 cast, a8, ANPD below": MultiLevel(shared, specjax.NGram(options.below_length)),
        "MXFP4 cast, a8, CORE below": MultiLevel(shared, small),
    }
    named = {name: Case(target, drafter, "plain") for name, drafter in drafters.items()}
    return {"plain": Case(target, PLAIN, "plain"), **named}


def measure_lengths(target: Params, prompts: Sequence[list[int]], options: Any) -> list[dict]:
    """The MXFP4 cast with constant draft lengths 1 … longest and with schedules."""
    cast, longest = specjax.quantize(target, "mxfp4", lm_head=True), options.lengths

    def case(length: int, **schedule: Any) -> Case:
        drafter = DraftModel(cast, length, share_cache=True, **schedule)
        return Case(target, drafter, "plain")

    plain = {"plain": Case(target, PLAIN, "plain")}
    constants = {str(n): case(n) for n in range(1, longest + 1)}
    ends = {name: constants[name] for name in ("1", str(longest))}
    _, least, most = (row["round_ms"] for row in measure(plain | ends, prompts, 1, options))
    slope = (most - least) / (longest - 1)
    adaptive = Adaptive(draft_cost=slope / (least - slope), row_cost=0.0)
    schedules = {
        "heuristic": case(longest, schedule=Heuristic()),
        f"adaptive, cost {adaptive.draft_cost:.3f}": case(longest, schedule=adaptive),
    }
    return measure(plain | constants | schedules, prompts, 1, options)


@jax.jit
def _finish(
    params: Params, state: DecodeState, drafter: specjax.Drafter
) -> tuple[DecodeState, tuple[Stats, ...]]:
    """The part of `decode` after the prompt is in the cache."""
    state = finish(params, state, drafter)
    return state, drafter.levels(state.draft)


def measure(
    cases: Cases, prompts: Sequence[list[int]], batch: int, options: Any
) -> list[dict[str, Any]]:
    """One row per case."""
    chunks = [prompts[i : i + batch] for i in range(0, max(options.prompts, batch), batch)]
    chunks = [pad(chunk, options.max_prompt) for chunk in chunks if len(chunk) == batch]
    states = {name: _start(case, chunks, options) for name, case in cases.items()}

    def run(name: str) -> tuple[float, list[tuple[DecodeState, tuple[Stats, ...]]]]:
        case = cases[name]
        begin = time.perf_counter()
        results = [_finish(case.target, state, case.drafter) for state in states[name]]
        jax.block_until_ready(results)
        return time.perf_counter() - begin, results

    outcomes = {name: run(name)[1] for name in cases}
    turns = [{name: run(name)[0] for name in cases} for _ in range(options.repeats)]
    seconds = {name: statistics.median(turn[name] for turn in turns) for name in cases}
    tokens = len(chunks) * batch * options.max_new_tokens
    return [
        {
            "part": "lengths" if options.lengths else "drafters",
            "batch": batch,
            "drafter": name,
            "draft_length": case.drafter.draft_length,
            "tokens_per_second": tokens / seconds[name],
            "speedup": seconds[case.plain] / seconds[name],
            **_acceptance(outcomes[name]),
            "round_ms": 1e3 * seconds[name] / _rounds(outcomes[name]),
            "extra_weight_mb": _extra_bytes(case.drafter, case.target) / 1e6,
            "extra_cache_mb": _extra_bytes(states[name][0].draft, None) / 1e6,
            "identical": _same(outcomes[name], outcomes[case.plain]),
        }
        for name, case in cases.items()
    ]


def _start(case: Case, chunks: Sequence[Any], options: Any) -> list[DecodeState]:
    """The state of every chunk of prompts, with the drafter's own state."""
    states = []
    for tokens, lengths in chunks:
        # The plain drafter, so that the pass over the prompt is compiled once per target.
        state = start(
            case.target, tokens, prompt_lengths=lengths, drafter=PLAIN, stop_tokens=(),
            max_new_tokens=options.max_new_tokens,
            cache_capacity=options.max_prompt + options.max_new_tokens + ROOM,
        )  # fmt: skip
        states.append(_with_drafter(case.target, state, case.drafter, options.max_prompt))
    return states


@partial(jax.jit, static_argnames="width")
def _with_drafter(
    params: Params, state: DecodeState, drafter: specjax.Drafter, width: int
) -> DecodeState:
    return dataclasses.replace(state, draft=drafter.init(params, state, width))


def _acceptance(outcomes: Sequence[tuple[DecodeState, tuple[Stats, ...]]]) -> dict[str, Any]:
    """Acceptance of the target, and of the level below it where there is one."""
    merged = [_merge([state.stats for state, _ in outcomes])]
    merged += [_merge(stats) for stats in zip(*(levels for _, levels in outcomes), strict=True)]
    row = {
        "token_acceptance": float(merged[0].token_acceptance),
        "tokens_per_round": float(merged[0].tokens_per_round),
    }
    for stats in merged[1:]:
        row["level_acceptance"] = float(stats.token_acceptance)
        row["level_tokens_per_round"] = float(stats.tokens_per_round)
    return row


def _merge(stats: Sequence[Stats]) -> Stats:
    return jax.tree.map(lambda *counts: jnp.concatenate(counts), *stats)


def _rounds(outcomes: Sequence[tuple[DecodeState, tuple[Stats, ...]]]) -> int:
    """Iterations of the loop: the most rounds of any row."""
    return sum(int(jnp.max(state.stats.rounds)) for state, _ in outcomes)


def _same(
    ours: Sequence[tuple[DecodeState, Any]], theirs: Sequence[tuple[DecodeState, Any]]
) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(np.array_equal(a[0].tokens, b[0].tokens) for a, b in pairs)


def _extra_bytes(tree: Any, shared: Any) -> int:
    """Bytes of the arrays in `tree` that are not in `shared`."""
    held = {id(leaf) for leaf in jax.tree.leaves(shared)}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if id(leaf) not in held)


if __name__ == "__main__":
    main()
