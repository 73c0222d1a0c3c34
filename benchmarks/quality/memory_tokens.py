"""Counts the tokens per pass that drafts without a model gain, at one budget of drafts per pass.

SmolLM2-135M-Instruct answers prompts of five kinds (`benchmarks.support.instruct`), greedily and
sampled, with each drafter. Every drafter proposes up to 7 tokens per pass: `Auto` from the text and
the memory that all prompts share, empty at first, as if passes of all widths took the same time;
ANPD, prompt lookup, Token Recycling, and SPECTRA-CORE with as many tokens, candidates included.
Drafts are chosen without chance, so outputs are plain decoding's, sampled ones too; each is
compared with the first drafter's.

    python -m benchmarks.quality.memory_tokens --json OUT
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import parser, sampled, table, write
from benchmarks.support.instruct import KINDS, MODEL, prompts, target
from specjax.drafting.costs import WIDTHS, Costs

BUDGET = WIDTHS[-1]
FREE = Costs(np.ones(len(WIDTHS), np.float32), np.float32(1))
DRAFTERS = {
    "text and memory": specjax.Auto(FREE),
    "ANPD": specjax.NGram(BUDGET),
    "prompt lookup": specjax.PromptLookup(BUDGET),
    "Token Recycling": specjax.TokenRecycling(BUDGET),
    "CORE, N = 3, W = 1, G = 3": specjax.Spectra(ngram=3, window=1, guesses=3),
}


def main() -> int:
    options = _options()
    asked = prompts(options.data, options.prompts, options.longest)
    kinds = np.array([kind for kind, _ in asked])
    rows: list[dict[str, Any]] = []
    first: dict[float, list[specjax.Completion]] = {}
    for name, drafter in tqdm(DRAFTERS.items(), file=sys.stderr):
        assert drafter.draft_length == BUDGET
        for temperature in options.temperatures:
            found = _decoded(drafter, [ids for _, ids in asked], temperature, options)
            same = first.setdefault(temperature, found)
            for kind in (*KINDS, "all"):
                where = np.flatnonzero((kinds == kind) | (kind == "all"))
                generated, rounds = (
                    sum(int(getattr(found[i].stats, count)) for i in where)
                    for count in ("generated", "rounds")
                )
                rows.append({
                    "model": MODEL, "target": "gguf", "drafter": name, "kind": kind,
                    "temperature": temperature, "prompts": len(where),
                    "tokens_per_round": generated / rounds,
                    "identical": sum(
                        np.array_equal(found[i].tokens, same[i].tokens) for i in where
                    ),
                })  # fmt: skip
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return 0 if all(row["identical"] == row["prompts"] for row in rows) else 1


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--prompts", type=int, default=6, help="prompts per kind")
    add("--longest", type=int, default=192, help="longer prompts are left out")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="0: greedy")
    add("--max-new-tokens", type=int, default=96)
    add("--rows", type=int, default=8)
    return parse.parse_args()


def _decoded(
    drafter: specjax.Drafter, asked: list[list[int]], temperature: float, options: Any
) -> list[specjax.Completion]:
    return specjax.decode_many(
        target("gguf"), asked, rows=options.rows, max_new_tokens=options.max_new_tokens,
        drafter=drafter, **sampled(temperature),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
