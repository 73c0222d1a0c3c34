"""Times drafters of SmolLM2 beside plain decoding: whole answers to real prompts, reading included.

Every prompt is answered by all cases in turn, each time beginning with another one, so that a busy
machine slows all of them. A ratio is plain decoding's time over the drafter's for the same prompts
and the same target; a model in 12 bits, or a nested one, is compared with plain decoding in
bfloat16, whose output it has. Rows hold the geometric mean of the ratios, with its 95 % interval by
bootstrap over prompts. Every output is compared with plain decoding's; sampled ones are the same
where drafts are chosen without chance. Programs are compiled before.

    python -m benchmarks.speed.instruct_drafters --json OUT
    python -m benchmarks.speed.instruct_drafters --batch 8 --json OUT
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import pad, parser, table, write
from benchmarks.support.instruct import KINDS, MODEL, Case, base, cases, prompts, target

COMPARED = (
    "Auto", "Auto, 16 bits", "Auto, 12 bits", "Auto, nested", "nested, QSpec(3) a8", "QSpec a8",
    "prompt lookup", "ANPD", "Lookahead, W = G = 2", "CORE, N = 4, W = 3, G = 4",
    "MXFP4 cast, a8", "MXFP4 cast, a8, ANPD below",
)  # fmt: skip
RESAMPLES = 2000


def main() -> int:
    options = _options()
    found = cases()
    chosen = {name: found[name] for name in options.drafters}
    models = [case.target for case in chosen.values()]
    targets = dict.fromkeys([*map(base, models), *models])
    plain = {f"plain, {name}": Case(name, specjax.Autoregressive) for name in targets}
    runs = {name: (case.target, case.make()) for name, case in {**plain, **chosen}.items()}
    chunks = list(_chunks(options))
    for width in options.widths:  # compiles every program
        tokens = np.ones((options.batch, width), np.int32)
        for name, drafter in runs.values():
            _answer(name, drafter, tokens, np.full(options.batch, width), options)
    seconds, outputs = _take_turns(runs, chunks, options)
    rows = _rows(runs, [kind for kind, *_ in chunks], seconds, outputs, options)
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return 0 if options.temperature or all(row["identical"] for row in rows) else 1


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--drafters", nargs="+", default=COMPARED, help="names in benchmarks/support/instruct.py")
    add("--prompts", type=int, default=24, help="prompts per kind")
    add("--widths", type=int, nargs="+", default=[96, 192], help="to which prompts are padded")
    add("--max-new-tokens", type=int, default=64)
    add("--batch", type=int, default=1, help="prompts of one kind at a time")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    return parse.parse_args()


def _chunks(options: Any) -> Iterable[tuple[str, np.ndarray, np.ndarray]]:
    """A kind, and `batch` prompts of it, padded to one of the widths."""
    asked = prompts(options.data, options.prompts, max(options.widths))
    for kind in KINDS:
        texts = [ids for each, ids in asked if each == kind]
        for begin in range(0, len(texts) - options.batch + 1, options.batch):
            chunk = texts[begin : begin + options.batch]
            longest = max(map(len, chunk))
            yield kind, *pad(chunk, min(width for width in options.widths if width >= longest))


def _answer(
    name: str, drafter: specjax.Drafter, tokens: np.ndarray, lengths: np.ndarray, options: Any
) -> specjax.DecodeResult:
    sampled: dict[str, Any] = {}
    if options.temperature:
        sampling = specjax.Sampling(temperature=options.temperature)
        sampled = {"sampling": sampling, "key": jax.random.key(0)}
    return jax.block_until_ready(
        specjax.decode(
            target(name), tokens, prompt_lengths=lengths, drafter=drafter,
            max_new_tokens=options.max_new_tokens,
            cache_capacity=max(options.widths) + options.max_new_tokens + 24,
            **sampled,
        )
    )  # fmt: skip


def _take_turns(
    runs: dict[str, tuple[str, specjax.Drafter]], chunks: list[Any], options: Any
) -> tuple[dict[str, list[float]], dict[str, list[specjax.DecodeResult]]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    outputs: dict[str, list[specjax.DecodeResult]] = {name: [] for name in runs}
    names = list(runs)
    for number, (_, tokens, lengths) in enumerate(tqdm(chunks, file=sys.stderr)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            result = _answer(*runs[name], tokens, lengths, options)
            seconds[name].append(time.perf_counter() - begin)
            outputs[name].append(result)
    return seconds, outputs


def _rows(
    runs: dict[str, tuple[str, specjax.Drafter]],
    kinds: list[str],
    seconds: dict[str, list[float]],
    outputs: dict[str, list[specjax.DecodeResult]],
    options: Any,
) -> list[dict[str, Any]]:
    rows = []
    for name, (model, _) in runs.items():
        plain = f"plain, {base(model)}"
        ratios = np.log(np.array(seconds[plain]) / np.array(seconds[name]))
        for kind in (*dict.fromkeys(kinds), "all"):
            where = [i for i, each in enumerate(kinds) if kind in (each, "all")]
            stats = [outputs[name][i].stats for i in where]
            generated, rounds = (
                sum(int(getattr(each, count).sum()) for each in stats)
                for count in ("generated", "rounds")
            )
            low, high = _interval(ratios[where])
            rows.append(
                {
                    "model": MODEL, "target": model, "drafter": name, "batch": options.batch,
                    "temperature": options.temperature, "kind": kind,
                    "prompts": options.batch * len(where),
                    "speedup": float(np.exp(ratios[where].mean())),
                    "speedup_low": low, "speedup_high": high,
                    "tokens_per_second": generated / sum(seconds[name][i] for i in where),
                    "tokens_per_round": generated / rounds,
                    "identical": all(
                        np.array_equal(outputs[name][i].tokens, outputs[plain][i].tokens)
                        for i in where
                    ),
                }
            )  # fmt: skip
    return rows


def _interval(ratios: np.ndarray) -> tuple[float, float]:
    drawn = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.exp(np.quantile(ratios[drawn].mean(axis=1), (0.025, 0.975)))
    return float(low), float(high)


if __name__ == "__main__":
    sys.exit(main())
