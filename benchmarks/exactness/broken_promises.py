"""Breaks five promises on purpose, one after the other, and shows which tests notice.

Each break changes one line of the checkout. `make test` must then fail. It stops at the first test
that fails, which the result names. The line is restored at the end; after a kill,
`git checkout specjax pallas_kernels` restores it. Do not edit the checkout meanwhile.

    python -m benchmarks.exactness.broken_promises --json OUT
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.support.common import ROOT, parser, refuse_dirty, table, write


class Break(NamedTuple):
    """A line of a file, and what stands there while the promise is broken."""

    promise: str
    how: str
    file: str
    line: str
    broken: str


BREAKS = (
    Break(
        "batch invariance", "sums of a row in an order that XLA chooses by shape",
        "pallas_kernels/row_sums.py",
        "    return _fold(jnp.add, x, 0.0)\n",
        "    return jnp.sum(x, axis=-1, keepdims=True)\n",
    ),
    Break(
        "cache entries", "the draft's entries stay where the verification writes",
        "specjax/speculation/rounds.py",
        "        cache=_line_up(cache, state, verified).with_lengths(lengths - 1),\n",
        "        cache=_line_up(state.cache, state, verified).with_lengths(lengths - 1),\n",
    ),
    Break(
        "rejection rule", "a rejected draft is replaced by a draw from the target itself",
        "specjax/speculation/acceptance.py",
        "    residual = _remainder(_at(target, accepted), q_there)\n",
        "    residual = _at(target, accepted)\n",
    ),
    Break(
        "atomic directory", "the old directory is removed before the new one takes its place",
        "specjax/files/atomic_directory.py",
        "    if not target.exists():\n        new.rename(target)\n",
        "    shutil.rmtree(target, ignore_errors=True)\n"
        "    if not target.exists():\n        new.rename(target)\n",
    ),
    Break(
        "sandbox", "system calls of judged programs are not filtered",
        "specjax/evaluation/box/keeper.py",
        "        system_calls.forbid()\n",
        "        pass\n",
    ),
)  # fmt: skip


def main() -> int:
    options = parser(__doc__).parse_args()
    refuse_dirty()
    rows = []
    for each in BREAKS:
        with broken(each):
            rows.append(_row(each))
        print(table(rows[-1:], list(rows[-1])), file=sys.stderr, flush=True)
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return 0 if all(row["noticed"] for row in rows) else 1


@contextlib.contextmanager
def broken(each: Break) -> Iterator[None]:
    """Breaks a promise, and keeps it again at the end of the block."""
    path = ROOT / each.file
    whole = path.read_text()
    assert whole.count(each.line) == 1, each
    path.write_text(whole.replace(each.line, each.broken))
    try:
        yield
    finally:
        path.write_text(whole)


def _row(each: Break) -> dict[str, Any]:
    begin = time.perf_counter()
    environment = os.environ | {"PYTEST_ADDOPTS": "--exitfirst"}
    command = ["make", "test"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return {
        "promise": each.promise,
        "broken": each.how,
        "noticed": run.returncode != 0 and bool(failed),
        "by": failed[0] if failed else None,
        "seconds": round(time.perf_counter() - begin),
    }


if __name__ == "__main__":
    sys.exit(main())
