"""Counts accepted drafts of an instruct model on real text, and compares outputs bit for bit.

SmolLM2-135M-Instruct answers prompts of five kinds (`benchmarks.support.instruct`) with every
drafter, greedily and at temperature 0.7. QSpec and the drafters without a model draft for the GGUF
file's model, casts for the same model dequantized to bfloat16. Its weights lie on a 4-bit grid in
groups of 32: **a 4-bit cast with groups of 32 is flattered**; look at wider groups, at MXFP4, and
at 3 and 2 bits instead.

Every greedy output is compared with plain decoding's of the same target. Sampled outputs differ
from one drafter to another, as they may: only their distribution is the same.

Each number has a 95 % interval, by bootstrap over the prompts (2,000 resamples):

    tokens per round    tokens per pass of the target
    kept                kept drafts over drafted ones; the papers' acceptance rate
    token acceptance    kept drafts over tested ones: a draft's chance, those before it being kept

    python -m benchmarks.quality.acceptance --work FOLDER --json OUT

`--work` keeps the counts of every finished drafter, from which a run that was ended goes on.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import COMMIT, parser, table, write
from benchmarks.support.instruct import KINDS, MODEL, Case, cases, prompts, target

TEMPERATURE = 0.7
RESAMPLES = 2000
COUNTS = ("rounds", "generated", "accepted", "drafted", "tested")
RATIOS = {
    "tokens_per_round": ("generated", "rounds"),
    "kept": ("accepted", "drafted"),
    "token_acceptance": ("accepted", "tested"),
}
PLAIN = specjax.Autoregressive


def main() -> int:
    options = _options()
    chosen = {name: case for name, case in cases().items() if options.only in (None, name)}
    rows: list[dict[str, Any]] = []
    for sampled, count in ((False, options.prompts), (True, options.sampled)):
        asked = prompts(options.data, count, options.longest)
        if asked:
            rows += _measure(chosen, asked, sampled, options)
    print(table(rows, list(dict.fromkeys(name for row in rows for name in row))))
    write(options.json, rows)
    greedy = [row for row in rows if row["kind"] == "all" and "identical" in row]
    different = sum(row["prompts"] - row["identical"] for row in greedy)
    print(f"\n{sum(row['prompts'] for row in greedy)} greedy outputs compared, {different} differ")
    return 1 if different else 0


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--work", type=Path, required=True, help="folder that keeps what is finished")
    add("--only", help="one drafter")
    add("--prompts", type=int, default=80, help="prompts per kind, greedily")
    add("--sampled", type=int, default=24, help="prompts per kind, sampled")
    add("--longest", type=int, default=384, help="longer prompts are left out")
    add("--max-new-tokens", type=int, default=64)
    add("--rows", type=int, default=8)
    return parse.parse_args()


def _measure(
    chosen: dict[str, Case], asked: list[tuple[str, list[int]]], sampled: bool, options: Any
) -> list[dict[str, Any]]:
    """One row per drafter and kind of text."""
    plain = {case.target: Case(case.target, PLAIN) for case in chosen.values()}
    outputs = {
        name: _counted(f"plain, {name}", case, asked, sampled, options)["tokens"]
        for name, case in ({} if sampled else plain).items()
    }
    kinds = np.array([kind for kind, _ in asked])
    rows = []
    for name, case in tqdm(
        chosen.items(), desc="sampled" if sampled else "greedy", file=sys.stderr
    ):
        found = _counted(name, case, asked, sampled, options)
        same = None if sampled else (found["tokens"] == outputs[case.target]).all(axis=1)
        for kind in (*KINDS, "all"):
            where = np.full(len(kinds), True) if kind == "all" else kinds == kind
            row = {
                "model": MODEL, "target": case.target, "drafter": name, "kind": kind,
                "temperature": TEMPERATURE if sampled else 0.0, "prompts": int(where.sum()),
            }  # fmt: skip
            if same is not None:
                row["identical"] = int(same[where].sum())
            rows.append(row | intervals({key: found[key][where] for key in COUNTS}))
    return rows


def _counted(
    name: str, case: Case, asked: list[tuple[str, list[int]]], sampled: bool, options: Any
) -> dict[str, np.ndarray]:
    """Outputs, padded with -1, and counts of every prompt; kept for the next run."""
    folder = options.work / COMMIT / f"{len(asked)}-{options.max_new_tokens}-{sampled}"
    file = folder / (re.sub(r"\W+", "_", name) + ".npz")
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = _decoded(case, asked, sampled, options)
        with (partial := file.with_suffix(".partial")).open("wb") as out:
            np.savez(out, allow_pickle=False, **found)
        partial.rename(file)
    with np.load(file) as kept:
        return dict(kept)


def _decoded(
    case: Case, asked: list[tuple[str, list[int]]], sampled: bool, options: Any
) -> dict[str, np.ndarray]:
    drawn = {"sampling": specjax.Sampling(temperature=TEMPERATURE), "key": jax.random.key(7)}
    completions = specjax.decode_many(
        target(case.target), [ids for _, ids in asked], rows=options.rows, drafter=case.make(),
        max_new_tokens=options.max_new_tokens, **(drawn if sampled else {}),
    )  # fmt: skip
    jax.clear_caches()
    width = options.longest + options.max_new_tokens
    tokens = np.full((len(asked), width), -1, np.int32)
    for row, completion in enumerate(completions):
        if completion.error is not None:
            raise ValueError(f"prompt {row}: {completion.error}")
        tokens[row, : len(completion.tokens)] = completion.tokens
    stats = [completion.stats for completion in completions]
    return {"tokens": tokens} | {
        key: np.array([int(getattr(each, key)) for each in stats]) for key in COUNTS
    }


def intervals(counts: dict[str, np.ndarray]) -> dict[str, float]:
    """Every ratio of sums over the prompts, with its 95 % interval."""
    size = len(counts["rounds"])
    drawn = np.random.default_rng(0).integers(0, size, (RESAMPLES, size))
    row: dict[str, Any] = {}
    for name, (top, bottom) in RATIOS.items():
        above, below = counts[top], counts[bottom]
        resampled = above[drawn].sum(axis=1) / np.maximum(below[drawn].sum(axis=1), 1)
        low, high = np.quantile(resampled, (0.025, 0.975))
        row |= {
            name: float(above.sum() / max(below.sum(), 1)),
            f"{name}_low": float(low),
            f"{name}_high": float(high),
        }
    return row


if __name__ == "__main__":
    sys.exit(main())
