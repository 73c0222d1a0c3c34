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
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import pad, parser, table, write
from benchmarks.support.instruct import KINDS, MODEL, Case, base, cases, prompts, target
from specjax.bench.turns import geometric_mean, take_turns

COMPARED = (
    "Auto", "Auto, 16 bits", "Auto, 12 bits", "Auto, nested", "nested, QSpec(3) a8", "QSpec a8",
    "prompt lookup", "ANPD", "Lookahead, W = G = 2", "CORE, N = 4, W = 3, G = 4",
    "MXFP4 cast, a8", "MXFP4 cast, a8, ANPD below",
)  # fmt: skip


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
    programs = {name: partial(_answered, *run, options) for name, run in runs.items()}
    with tqdm(total=len(chunks) * len(programs), file=sys.stderr) as bar:
        seconds, outputs = take_turns(programs, chunks, ran=bar.update)
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


def _answered(
    name: str, drafter: specjax.Drafter, options: Any, chunk: tuple[str, np.ndarray, np.ndarray]
) -> specjax.DecodeResult:
    _, tokens, lengths = chunk
    return _answer(name, drafter, tokens, lengths, options)


def _rows(
    runs: dict[str, tuple[str, specjax.Drafter]],
    kinds: list[str],
    seconds: dict[str, np.ndarray],
    outputs: dict[str, list[specjax.DecodeResult]],
    options: Any,
) -> list[dict[str, Any]]:
    rows = []
    for name, (model, _) in runs.items():
        plain = f"plain, {base(model)}"
        ratios = seconds[plain][0] / seconds[name][0]
        for kind in (*dict.fromkeys(kinds), "all"):
            where = [i for i, each in enumerate(kinds) if kind in (each, "all")]
            stats = [outputs[name][i].stats for i in where]
            generated, rounds = (
                sum(int(getattr(each, count).sum()) for each in stats)
                for count in ("generated", "rounds")
            )
            speedup = geometric_mean(ratios[where])
            rows.append(
                {
                    "model": MODEL, "target": model, "drafter": name, "batch": options.batch,
                    "temperature": options.temperature, "kind": kind,
                    "prompts": options.batch * len(where),
                    "speedup": speedup.mean,
                    "speedup_low": speedup.low, "speedup_high": speedup.high,
                    "tokens_per_second": generated / float(seconds[name][0, where].sum()),
                    "tokens_per_round": generated / rounds,
                    "identical": all(
                        np.array_equal(outputs[name][i].tokens, outputs[plain][i].tokens)
                        for i in where
                    ),
                }
            )  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
