"""Measures the time and memory of converting a model of a billion parameters.

The script writes random weights in the shape of Llama 3.2 1B (bfloat16, two shards) and converts
them to 4 bits with round-to-nearest in a process of its own. The claim: the peak memory of that
process stays below the quantized model plus one shard plus the memory of the interpreter and JAX.
With --kill N the script starts N more conversions, kills each at a random moment, and checks that
the output is whole or absent.

    python -m benchmarks.memory.convert_1b /tmp/convert_1b --json result.json --kill 20
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.support.common import parser, table, write
from checkpoints_tools import checkpoint
from checkpoints_tools.huggingface import their_name
from checkpoints_tools.huggingface_config import read_config
from specjax.model.weight_names import weight_shapes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SHARDS = 2

CHILD = """
import re, sys, time
from pathlib import Path
import jax.numpy as jnp
from checkpoints_tools.conversion import convert

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

jnp.ones((8, 8)).sum().block_until_ready()
baseline, started = peak(), time.perf_counter()
convert(sys.argv[1], sys.argv[2], quantization="rtn", progress=False)
print(time.perf_counter() - started, baseline, peak())
"""


def write_source(path: Path) -> None:
    """A Hugging Face directory of random weights, written shard by shard."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {their_name(name): shape for name, shape in weight_shapes(read_config(path)).items()}
    total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    generator, written = np.random.default_rng(0), 0
    weight_map: dict[str, str] = {}
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(SHARDS)]
    for name, shape in shapes.items():
        shards[min(written * SHARDS // total, SHARDS - 1)][name] = shape
        written += 2 * int(np.prod(shape))
    for index, names in enumerate(shards, 1):
        file = f"model-{index:05}-of-{SHARDS:05}.safetensors"
        save_file({name: _random(generator, shape) for name, shape in names.items()}, path / file)
        weight_map |= dict.fromkeys(names, file)
    index_file = path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _random(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= 0.02
    return values.astype(ml_dtypes.bfloat16)


def start(source: Path, out: Path) -> subprocess.Popen[str]:
    """A conversion in a process of its own."""
    command = [sys.executable, "-c", CHILD, str(source), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(source: Path, out: Path) -> dict[str, Any]:
    """One whole conversion: its seconds, its memory, and the bound on the memory."""
    started = time.perf_counter()
    process = start(source, out)
    output, _ = process.communicate()
    elapsed = time.perf_counter() - started
    if process.returncode:
        raise SystemExit("the conversion failed")
    seconds, baseline, peak = (float(value) for value in output.split())
    quantized = checkpoint.load(out).nbytes
    shard = max(file.stat().st_size for file in source.glob("*.safetensors"))
    bound = baseline + quantized + shard
    return {
        "convert_seconds": round(seconds, 2),
        "process_seconds": round(elapsed, 2),
        "baseline_bytes": int(baseline),
        "quantized_bytes": quantized,
        "largest_shard_bytes": shard,
        "written_bytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        "peak_bytes": int(peak),
        "bound_bytes": int(bound),
        "peak_over_bound": round(peak / bound, 3),
    }


def kill_runs(source: Path, out: Path, runs: int, seconds: float) -> dict[str, int]:
    """Kills conversions at random moments. Raises if one leaves part of a checkpoint."""
    moments = random.Random(0)
    counts = {"killed_absent": 0, "killed_whole": 0}
    for _ in range(runs):
        shutil.rmtree(out, ignore_errors=True)
        process = start(source, out)
        try:
            if process.wait(moments.uniform(0, 1.1 * seconds)):
                raise SystemExit("a conversion failed before it was killed")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if out.exists():
            jax.block_until_ready(checkpoint.load(out))
        counts["killed_whole" if out.exists() else "killed_absent"] += 1
    return counts


def leftovers(out: Path) -> list[Path]:
    """Files of killed runs that the next whole run has not removed."""
    return list(out.parent.glob(f".{out.name}.*"))


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="where to write; needs 5 GB")
    parse.add_argument("--kill", type=int, default=0, metavar="N", help="conversions to kill")
    options = parse.parse_args()
    source, out = options.folder / "source", options.folder / "out"
    if not source.exists():
        write_source(source)
    shutil.rmtree(out, ignore_errors=True)
    row = measure(source, out)
    if options.kill:
        row |= kill_runs(source, out, options.kill, row["process_seconds"])
        measure(source, out)
        row["leftovers"] = len(leftovers(out))
    print(table([row], list(row)))
    write(options.json, [row])


if __name__ == "__main__":
    main()
