"""Times `Auto` beside plain decoding in turns, cell by cell: does the default ever lose?

A cell is a target, a batch size, a temperature and a kind of text. SmolLM2 answers one batch of
real prompts, reading included, by plain decoding, by `Auto` and by plain decoding again, one right
after the other and in another order at every turn: neighbours on the machine slow all of them.
*speedup* is the median over six turns, one per order, of the geometric mean of both plain
decodings' times over `Auto`'s; *low* and *high* are the least and the greatest of the six, which
hold the median between them with a probability of 97 %. *control* is the same of the first plain
decoding over the second: it would be 1 on a machine without neighbours, so its distance from 1 is
chance alone. All have the same target. Programs are compiled before, and costs are measured.

A file is written after every cell. The same command on the same commit goes on where it was
stopped.

    python -m benchmarks.speed.never_slower --batch 4 8 16 --temperature 0 0.7 1.0 --json OUT
"""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import kept_rows, parser, sampled, table, write
from benchmarks.support.instruct import KINDS, MODEL, chunks, target

_ARMS = specjax.Autoregressive(), specjax.Auto(), specjax.Autoregressive()
_ORDERS = tuple(itertools.permutations(range(len(_ARMS))))
_SPARE = 24  # slots beside the longest prompt and its answer


def main() -> None:
    options = _options()
    rows = kept_rows(options.json)
    axes = options.batch, options.targets, options.temperature, KINDS
    cells = [dict(zip(("batch", "target", "temperature", "kind"), cell, strict=True))
             for cell in itertools.product(*axes)]  # fmt: skip
    done = [{name: row[name] for name in cells[0]} for row in rows]
    for cell in tqdm([cell for cell in cells if cell not in done], file=sys.stderr):
        rows.append({"model": MODEL, **cell, **_measured(cell, options)})
        write(options.json, rows)
    print(table(rows, list(rows[0])))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    targets = ("gguf", "bfloat16", "nested16")
    add("--targets", nargs="+", choices=targets, default=targets)
    add("--batch", type=int, nargs="+", default=[4, 8, 16])
    add("--temperature", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="0: greedy")
    add("--widths", type=int, nargs="+", default=[96, 192], help="to which prompts are padded")
    add("--max-new-tokens", type=int, default=64)
    return parse.parse_args()


def _measured(cell: dict[str, Any], options: Any) -> dict[str, Any]:
    """The numbers of one cell."""
    found = chunks(options.data, cell["batch"], cell["batch"], options.widths)
    tokens, lengths = next(chunk[1:] for chunk in found if chunk[0] == cell["kind"])
    decode = partial(
        specjax.decode, target(cell["target"]), tokens, prompt_lengths=lengths,
        max_new_tokens=options.max_new_tokens,
        cache_capacity=max(options.widths) + options.max_new_tokens + _SPARE,
        **sampled(cell["temperature"]),
    )  # fmt: skip

    def timed(drafter: specjax.Drafter) -> tuple[float, specjax.DecodeResult]:
        begin = time.perf_counter()
        result = jax.block_until_ready(decode(drafter=drafter))
        return time.perf_counter() - begin, result

    plain, auto, _ = (timed(drafter)[1] for drafter in _ARMS)  # compiles
    seconds = np.zeros((len(_ORDERS), len(_ARMS)))
    for turn, order in enumerate(_ORDERS):
        for arm in order:
            seconds[turn, arm] = timed(_ARMS[arm])[0]
    first, drafted, second = seconds.T
    return {
        **_median("speedup", np.sqrt(first * second) / drafted),
        **_median("control", first / second),
        "tokens_per_round": float(auto.stats.generated.sum() / auto.stats.rounds.sum()),
        "drafted": int(auto.stats.drafted.sum()),
        "identical": bool(np.array_equal(plain.tokens, auto.tokens)),
    }  # fmt: skip


def _median(name: str, ratios: np.ndarray) -> dict[str, float]:
    """The median, the least and the greatest."""
    middle, low, high = np.median(ratios), ratios.min(), ratios.max()
    return {name: float(middle), f"{name}_low": float(low), f"{name}_high": float(high)}


if __name__ == "__main__":
    main()
