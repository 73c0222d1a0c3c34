"""Measures tables of the papers on SmolLM2, with the papers' numbers beside.

A table is measured by `specjax.bench`: greedy answers to real prompts, reading included, plain
decoding and the drafters taking turns. A killed run goes on where it stopped. The tables are in
`benchmarks/support/papers.py`; docs/papers.md says what differs.

    python -m benchmarks.speed.papers qspec_4 --json benchmarks/results/MACHINE/papers_qspec_4.json
"""

from __future__ import annotations

from typing import Any

import specjax
from benchmarks.support.common import COMMIT, parser, table, write
from benchmarks.support.instruct import MODEL, prompts, target
from benchmarks.support.papers import TABLES, Table
from specjax.bench import Cell, Subject, bench
from specjax.evaluation.progress_bar import progress_bar


def main() -> None:
    options = _options()
    chosen = TABLES[options.table]
    asked = prompts(options.data, options.prompts, options.longest, chosen.kinds)
    subject = Subject(
        MODEL,
        _target(chosen.target, options),
        {name: make() for name, make in chosen.drafters.items()},
        {kind: [ids for each, ids in asked if each == kind] for kind in chosen.kinds},
    )
    out = options.json and options.json.with_suffix(f".{COMMIT}.jsonl")
    with progress_bar(leave=True) as show:
        cells = bench(
            [subject], rows=chosen.rows, max_new_tokens=options.max_new_tokens,
            turns=options.turns, out=out, progress=show,
        )  # fmt: skip
    rows = [_row(cell, chosen) for cell in cells]
    print(table(rows, list(rows[0])))
    write(options.json, rows)


def _options() -> Any:
    parse = parser(__doc__)
    parse.add_argument("table", choices=TABLES)
    parse.add_argument("--prompts", type=int, default=32, help="prompts per kind")
    parse.add_argument("--longest", type=int, default=224, help="tokens of a prompt")
    parse.add_argument("--max-new-tokens", type=int, default=64)
    parse.add_argument("--turns", type=int, default=1)
    return parse.parse_args()


def _target(name: str, options: Any) -> specjax.Params:
    """The target; Atom is calibrated on WikiText."""
    if name not in ("atom", "quarot"):
        return target(name)
    text = (options.data / "texts" / "wikitext2_valid.txt").read_text()
    tokens = specjax.calibration_tokens(text, specjax.load_tokenizer(MODEL), length=256)
    calibration = tokens if name == "atom" else None
    return specjax.quantize(target("bfloat16"), name, calibration=calibration)


def _row(cell: Cell, chosen: Table) -> dict[str, Any]:
    numbers = cell.numbers()
    halves = cell.draft_seconds + cell.verify_seconds
    return {
        "target": chosen.target, "kind": cell.texts, "batch": cell.rows, "drafter": cell.drafter,
        "prompts": cell.prompts,
        **{name: numbers[name] for name in ("speedup", "speedup_low", "speedup_high")},
        "tokens_per_second": numbers["tokens_per_second"], "kept": numbers["kept"],
        "accepted": cell.accepted / cell.tested if cell.tested else None,
        "tokens_per_round": numbers["tokens_per_round"], "draft_share": cell.draft_seconds / halves,
        "bytes": numbers["bytes"], "identical": cell.identical == cell.prompts,
        "compared": chosen.column,
        "paper": chosen.number(cell.drafter, cell.texts, cell.rows),
    }  # fmt: skip


if __name__ == "__main__":
    main()
