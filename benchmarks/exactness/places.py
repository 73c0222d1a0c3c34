"""Checks that a prompt and a key give the same tokens alone, in a batch and in a queue.

SmolLM2 answers prompts of five kinds at temperature 0.7, each prompt with a key of its own, with
every drafter of `benchmarks.support.instruct`: alone, in one batch with all others, and through
`decode_many`, where a row takes the next prompt when it finishes one.

    python -m benchmarks.exactness.places --json OUT
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import pad, parser, table, write
from benchmarks.support.instruct import MODEL, cases, prompts, target

SAMPLING = specjax.Sampling(temperature=0.7)


def main() -> int:
    options = _options()
    asked = [ids for _, ids in prompts(options.data, options.prompts, options.longest)]
    rows = []
    for name, case in tqdm(cases().items(), file=sys.stderr):
        if options.only in (None, name):
            where = {"model": MODEL, "target": case.target, "drafter": name}
            rows.append(where | _compare(target(case.target), case.make(), asked, options))
            jax.clear_caches()
            print(rows[-1], flush=True)
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    different = sum(row["batch_differs"] + row["queue_differs"] for row in rows)
    print(f"\n{2 * sum(row['prompts'] for row in rows)} outputs compared, {different} differ")
    return 1 if different else 0


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--only", help="one drafter")
    add("--prompts", type=int, default=3, help="prompts per kind")
    add("--longest", type=int, default=128, help="longer prompts are left out")
    add("--max-new-tokens", type=int, default=48)
    add("--rows", type=int, default=4, help="rows of the queue")
    return parse.parse_args()


def _compare(
    params: specjax.Params, drafter: specjax.Drafter, asked: list[list[int]], options: Any
) -> dict[str, Any]:
    keys = jax.vmap(lambda number: jax.random.fold_in(jax.random.key(3), number))(
        np.arange(len(asked))
    )
    common: dict[str, Any] = {
        "drafter": drafter, "sampling": SAMPLING, "max_new_tokens": options.max_new_tokens,
    }  # fmt: skip

    def batch(chosen: slice) -> list[list[int]]:
        tokens, lengths = pad(asked[chosen], options.longest)
        result = specjax.decode(params, tokens, prompt_lengths=lengths, key=keys[chosen], **common)
        ends = np.asarray(result.lengths)
        return [
            row[:end].tolist() for row, end in zip(np.asarray(result.tokens), ends, strict=True)
        ]

    alone = [batch(slice(i, i + 1))[0] for i in range(len(asked))]
    together = batch(slice(None))
    queued = specjax.decode_many(params, asked, rows=options.rows, key=keys, **common)
    return {
        "prompts": len(asked),
        "tokens": sum(map(len, alone)),
        "batch_differs": sum(a != b for a, b in zip(alone, together, strict=True)),
        "queue_differs": sum(a != q.tokens.tolist() for a, q in zip(alone, queued, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
