"""Times drafters of SmolLM2 beside plain decoding: whole answers to real prompts, reading included.

Every prompt is answered by all cases in turn, each time beginning with another one, so that a busy
machine slows all of them. A ratio is plain decoding's time over the drafter's for the same prompts
and the same target; a model in 12 bits, or a nested one, is compared with plain decoding in
bfloat16, whose output it has. Rows hold the geometric mean of the ratios, with its 95 % interval by
bootstrap over prompts. Every output is compared with plain decoding's; sampled ones are the same
where drafts are chosen without chance. Programs are compiled before.

A file is written after every batch size and temperature. The same command on the same commit goes
on where it was stopped.

    python -m benchmarks.speed.instruct_drafters --json OUT
    python -m benchmarks.speed.instruct_drafters --batch 1 4 8 --temperature 0 0.7 --json OUT
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import kept_rows, parser, sampled, table, write
from benchmarks.support.instruct import MODEL, Case, Chunk, base, cases, chunks, target
from specjax.bench.turns import geometric_mean, take_turns

COMPARED = (
    "Auto", "Auto, 16 bits", "Auto, 12 bits", "Auto, nested", "nested, QSpec(3) a8", "QSpec a8",
    "prompt lookup", "ANPD", "Lookahead, W = G = 2", "CORE, N = 4, W = 3, G = 4",
    "MXFP4 cast, a8", "MXFP4 cast, a8, ANPD below",
)  # fmt: skip


Runs = dict[str, tuple[str, specjax.Drafter]]


class _Cell(NamedTuple):
    batch: int
    temperature: float


def main() -> int:
    options = _options()
    runs = _runs(options.drafters)
    rows = kept_rows(options.json)
    done = {(row["batch"], row["temperature"]) for row in rows}
    cells = set(itertools.starmap(_Cell, itertools.product(options.batch, options.temperature)))
    for cell in sorted(cells - done):
        rows += _measured(runs, cell, options)
        write(options.json, rows)
    print(table(rows, list(rows[0])))
    return 0 if all(row["identical"] or row["temperature"] for row in rows) else 1


def _runs(names: Iterable[str]) -> Runs:
    """The targets and drafters by name, plain decoding of every target among them."""
    found = cases()
    chosen = {name: found[name] for name in names}
    models = [case.target for case in chosen.values()]
    targets = dict.fromkeys([*map(base, models), *models])
    plain = {f"plain, {name}": Case(name, specjax.Autoregressive) for name in targets}
    return {name: (case.target, case.make()) for name, case in {**plain, **chosen}.items()}


def _measured(runs: Runs, cell: _Cell, options: Any) -> list[dict[str, Any]]:
    """The rows of one batch size and temperature."""
    asked = list(chunks(options.data, options.prompts, cell.batch, options.widths))
    programs = {name: partial(_answered, *run, cell, options) for name, run in runs.items()}
    for width, answer in itertools.product(options.widths, programs.values()):  # compiles them
        answer(("", np.ones((cell.batch, width), np.int32), np.full(cell.batch, width)))
    with tqdm(total=len(asked) * len(programs), desc=str(cell), file=sys.stderr) as bar:
        seconds, outputs = take_turns(programs, asked, ran=bar.update)
    return _rows(runs, [kind for kind, *_ in asked], seconds, outputs, cell)


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--drafters", nargs="+", default=COMPARED, choices=cases())
    add("--prompts", type=int, default=24, help="prompts per kind")
    add("--widths", type=int, nargs="+", default=[96, 192], help="to which prompts are padded")
    add("--max-new-tokens", type=int, default=64)
    add("--batch", type=int, nargs="+", default=[1], help="prompts of one kind at a time")
    add("--temperature", type=float, nargs="+", default=[0.0], help="0: greedy")
    return parse.parse_args()


def _answered(
    name: str, drafter: specjax.Drafter, cell: _Cell, options: Any, chunk: Chunk
) -> specjax.DecodeResult:
    _, tokens, lengths = chunk
    return jax.block_until_ready(
        specjax.decode(
            target(name), tokens, prompt_lengths=lengths, drafter=drafter,
            max_new_tokens=options.max_new_tokens,
            cache_capacity=max(options.widths) + options.max_new_tokens + 24,
            **sampled(cell.temperature),
        )
    )  # fmt: skip


def _rows(
    runs: Runs,
    kinds: list[str],
    seconds: dict[str, np.ndarray],
    outputs: dict[str, list[specjax.DecodeResult]],
    cell: _Cell,
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
                    "model": MODEL, "target": model, "drafter": name, "batch": cell.batch,
                    "temperature": cell.temperature, "kind": kind,
                    "prompts": cell.batch * len(where),
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
