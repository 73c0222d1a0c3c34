"""Measures whether two halves of a batch, drafting and verifying at different times, are faster.

A draft is bound by memory and a verification by arithmetic. So one half of the rows could draft
while the other half verifies. Here each half has a process and a core of its own, and nothing holds
their rounds in step; beside it stands the whole batch on both cores, which reads the weights once
for all rows. SmolLM2 answers real prompts, reading included. The two take turns. `speedup` is the
whole batch's time over that of the slower half: the median over the turns.

    python -m benchmarks.speed.overlapped --json OUT
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import specjax
from benchmarks.support.common import ROOT, pad, parser, table, write
from benchmarks.support.instruct import MODEL, prompts, target

CASES: dict[str, tuple[str, specjax.Drafter]] = {
    "QSpec(3) a8": ("gguf", specjax.QSpec(3, "a8")),
    "nested, QSpec(3) a8": ("nested16", specjax.QSpec(3, "a8")),
    "plain": ("gguf", specjax.Autoregressive()),
}


def main() -> None:
    options = _options()
    if options.share is not None:
        _decode(options)
    else:
        _compare(options)


def _compare(options: Any) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this needs two cores")
    cores = sorted(os.sched_getaffinity(0))[:2]
    rows = []
    for case in options.cases:
        whole = [_Worker(case, (0, 1), cores, options)]
        halves = [_Worker(case, (n, 2), cores[n : n + 1], options) for n in range(2)]
        both = whole, halves
        for workers in both:
            _seconds(workers)  # compiles
        turns = [[_seconds(workers) for workers in both] for _ in range(options.turns)]
        for worker in (*whole, *halves):
            worker.close()
        rows.append({
            "model": MODEL, "drafter": case, "batch": options.batch, "prompts": options.prompts,
            "whole_seconds": statistics.median(a for a, _ in turns),
            "halves_seconds": statistics.median(b for _, b in turns),
            "speedup": statistics.median(a / b for a, b in turns),
        })  # fmt: skip
        print(table(rows[-1:], list(rows[-1])), flush=True)
    write(options.json, rows)


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--prompts", type=int, default=32)
    add("--batch", type=int, default=8, help="rows of the whole batch")
    add("--max-new-tokens", type=int, default=64)
    add("--turns", type=int, default=5)
    add("--share", type=int, nargs=2, help=argparse.SUPPRESS)  # which part of how many: a worker
    return parse.parse_args()


class _Worker:
    """A process that decodes its share of the prompts on its own cores whenever it is asked."""

    def __init__(
        self, case: str, share: tuple[int, int], cores: Sequence[int], options: Any
    ) -> None:
        settings = {
            "--cases": case, "--prompts": options.prompts, "--batch": options.batch,
            "--max-new-tokens": options.max_new_tokens, "--data": options.data,
        }  # fmt: skip
        given = [str(each) for pair in settings.items() for each in pair]
        command = [sys.executable, "-m", "benchmarks.speed.overlapped", *given]
        self._process = subprocess.Popen(
            [*command, "--share", *map(str, share)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip

    def begin(self) -> None:
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)

    def seconds(self) -> float:
        assert self._process.stdout is not None
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _seconds(workers: Sequence[_Worker]) -> float:
    """The seconds of the slowest worker; all begin at once."""
    for worker in workers:
        worker.begin()
    return max([worker.seconds() for worker in workers])


def _decode(options: Any) -> None:
    """A worker: decodes for every line that comes, and prints the seconds."""
    number, of = options.share
    name, drafter = CASES[options.cases[0]]
    params = target(name)
    asked = [ids for _, ids in prompts(options.data, options.prompts, 256)][: options.prompts]
    rows, width = options.batch // of, max(map(len, asked))
    own = asked[number::of]
    for _ in sys.stdin:
        begin = time.perf_counter()
        for first in range(0, len(own), rows):
            tokens, lengths = pad(own[first : first + rows], width)
            result = specjax.decode(
                params, tokens, prompt_lengths=lengths, max_new_tokens=options.max_new_tokens,
                drafter=drafter, stop_tokens=(),
            )  # fmt: skip
            np.asarray(result.tokens)
        print(json.dumps(time.perf_counter() - begin), flush=True)


if __name__ == "__main__":
    main()
