"""Times what a user waits for before the first token: imports, loading, tracing and compiling.

Each row is a new process, in which SmolLM2 answers a prompt once per column:

    import, load     `import specjax` beyond `import jax`, and `specjax.load("smollm2")`
    first            the first decode, with nothing compiled yet, or with what a process before
                     kept; Auto's first of all also measures what passes cost
    length, output, temperature
                     another prompt length, another max_new_tokens, and another temperature; each
                     decodes a few tokens and compiles nothing

    python -m benchmarks.speed.waiting --json OUT

`--turns` processes are started per row; the median is kept. Python has compiled the modules before,
as an installation does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.support.common import parser, table, write

DRAFTERS = {
    "plain": "specjax.Autoregressive()",
    "Auto": "specjax.Auto()",
    "QSpec": "specjax.QSpec()",
    "two levels": "specjax.MultiLevel(specjax.QSpec(8), specjax.NGram(2))",
    "CORE, N = 4, W = 3, G = 4": "specjax.Spectra(ngram=4, window=3, guesses=4)",
    "CORE": "specjax.Spectra()",
}
PROGRAM = """
import json, sys, time
import jax
import jax.numpy as jnp

jnp.zeros(1).block_until_ready()
seconds = {{}}
last = time.perf_counter()


def passed(name):
    global last
    now = time.perf_counter()
    seconds[name] = now - last
    last = time.perf_counter()


import specjax

specjax.decode
passed("import")
params = specjax.load("smollm2")
passed("load")


def decoded(name, length, new, temperature):
    sampling = specjax.Sampling(temperature=temperature)
    result = specjax.decode(
        params, [list(range(100, 100 + length))], max_new_tokens=new, drafter={drafter},
        sampling=sampling, key=jax.random.key(0), stop_tokens=(),
    )
    result.tokens.block_until_ready()
    passed(name)


decoded("first", 20, 4, 0.7)
decoded("length", 23, 4, 0.7)
decoded("output", 23, 5, 0.7)
decoded("temperature", 23, 5, 0.9)
print(json.dumps(seconds))
"""


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--turns", type=int, default=3)
    options = parse.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        _seconds(DRAFTERS["plain"], cache)  # Python compiles the modules
    for name, drafter in DRAFTERS.items():
        cold, warm = [], []
        for _ in range(options.turns):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(_seconds(drafter, cache))
                warm.append(_seconds(drafter, cache))
        for process, runs in (("first", cold), ("second", warm)):
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows.append({"drafter": name, "process": process, **medians})
            print(table(rows[-1:], list(rows[-1])), flush=True)
    write(options.json, rows)
    return 0


def _seconds(drafter: str, cache: str) -> dict[str, float]:
    """The seconds of every step in a process that keeps its programs in `cache`."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(drafter=drafter)],
        env={**kept, "XDG_CACHE_HOME": cache}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


if __name__ == "__main__":
    sys.exit(main())
