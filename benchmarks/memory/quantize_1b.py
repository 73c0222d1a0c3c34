"""Measures quantizing a model of a billion parameters, and checks that a killed run ends the same.

Random weights in the shape of Llama 3.2 1B (those of `convert_1b`) are quantized by
`specjax convert --quantize`, every method in a process of its own, the calibrated ones on 16
sequences of 512 tokens of WikiText-2. The claims: each method keeps to its time and to 6 GB, and a
run that is killed halfway and started again writes the same arrays bit for bit.

    python -m benchmarks.memory.quantize_1b /tmp/quantize_1b --kill gptq --json result.json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.memory.convert_1b import leftovers, write_source
from benchmarks.support.common import parser, table, write
from checkpoints_tools import checkpoint
from checkpoints_tools.quantization.recipe import Recipe

METHODS = ("rtn", "mxfp4", "gptq", "awq", "atom")
SEQUENCES, LENGTH = 16, 512
SECONDS, CALIBRATED_SECONDS = 60, 1800  # limits for a method, on two cores
BYTES = 6e9

CHILD = """
import json, re, sys, time
from pathlib import Path
from specjax.cli import main

status = main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(json.dumps({"cpu_seconds": round(time.process_time(), 1), "peak_bytes": int(peak) * 1024}))
sys.exit(status)
"""


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="where to write; needs 6 GB")
    parse.add_argument("--methods", nargs="+", default=METHODS)
    parse.add_argument("--kill", nargs="*", default=(), help="methods to kill and resume too")
    options = parse.parse_args()
    source, out = options.folder / "source", options.folder / "out"
    if not source.exists():
        write_source(source)
        # Any tokenizer within the vocabulary will do, because the weights are random.
        shutil.copy(options.data / "tokenizers" / "gpt2" / "tokenizer.json", source)
    rows: list[dict[str, Any]] = []
    for method in options.methods:
        arguments = _arguments(source, method, options.data)
        rows.append({"method": method} | measure(arguments, out / method))
        rows[-1]["limit_seconds"] = (
            CALIBRATED_SECONDS if Recipe(method).needs_calibration else SECONDS
        )
        if method in options.kill:
            rows[-1] |= kill_and_resume(arguments, out / method, rows[-1]["seconds"])
        shutil.rmtree(out)
        print(table(rows[-1:], list(rows[-1])), flush=True)
        write(options.json, rows)
    return 0 if all(map(_kept, rows)) else 1


def _kept(row: dict[str, Any]) -> bool:
    """Whether a method has kept to the claims."""
    within = row["seconds"] < row["limit_seconds"] and row["peak_bytes"] < BYTES
    return within and row.get("identical", True)


def _arguments(source: Path, method: str, data: Path) -> list[str]:
    """The arguments of `specjax convert`, without the output directory."""
    arguments = ["convert", str(source), "--quantize", method]
    if Recipe(method).needs_calibration:
        arguments += ["--calibration", str(data / "texts" / "wikitext2_valid.txt")]
        arguments += ["--sequences", str(SEQUENCES), "--length", str(LENGTH)]
    return arguments


def start(arguments: list[str], out: Path) -> subprocess.Popen[str]:
    """A quantization in a process of its own."""
    command = [sys.executable, "-c", CHILD, *arguments, str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(arguments: list[str], out: Path) -> dict[str, Any]:
    """One whole quantization: seconds of wall and processor time, and peak memory."""
    started = time.perf_counter()
    process = start(arguments, out)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit("the quantization failed")
    return {"seconds": round(time.perf_counter() - started, 1)} | json.loads(output)


def kill_and_resume(arguments: list[str], whole: Path, seconds: float) -> dict[str, Any]:
    """Kills a run after half the time of the whole one, and resumes it in another process."""
    out = whole.with_name(f"{whole.name}-resumed")
    process = start(arguments, out)
    try:
        process.wait(seconds / 2)
        raise SystemExit("the quantization ended before it could be killed")
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    layers = [file for folder in leftovers(out) for file in folder.glob("layer-*.safetensors")]
    resumed = measure(arguments, out)
    return {
        "killed_after_seconds": round(seconds / 2, 1),
        "layers_kept": len(layers),
        "resumed_seconds": resumed["seconds"],
        "resumed_cpu_seconds": resumed["cpu_seconds"],
        "identical": _same_bits(out, whole),
    }


def _same_bits(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same arrays. (Orbax names its files at random.)"""
    left, right = checkpoint.load(one), checkpoint.load(other)
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
    )


if __name__ == "__main__":
    sys.exit(main())
