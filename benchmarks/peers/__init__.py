"""Other engines, each in its own process and in an environment that `install.sh` makes.

No module imports anything that needs jax. `*_texts` continue texts and `*_logits` computes logits
of a real model; the others are for the decode step in benchmarks/speed/decode_step.py. These read
the shape from here and print one line of JSON per measurement. They make their own models with
random weights and keep them for the next run.

For a decode step every engine decodes with all cores, one new token per row and call, without
sampling, and reads prompts with the logits of every token. Row 0's prompt is copied to the cache
entries of the other rows. Half of the measured steps lie before the requested context, half after
it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Llama-3.2-1B with a head of its own, so that the head and the embedding have their own precision.
SHAPE = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_layers": 16,
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip
STEPS = 8  # per measured call
ROUNDS = 7
CORES = len(os.sched_getaffinity(0))


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all peers share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 2048])
    parser.add_argument("--layers", type=int, default=SHAPE["num_layers"], help="fewer for a trial")
    parser.add_argument("--read", nargs="+", type=int, default=[], help="also prompts of so many")
    models = Path(tempfile.gettempdir()) / "specjax-peers"
    parser.add_argument("--models", type=Path, default=models, help="folder for their models")
    return parser


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """Makes `path` unless it exists, under another name until it is whole. Returns it."""
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.rename(path)
    return path


def prompt_length(context: int) -> int:
    """Tokens in the cache before the first step, so that the middle step finds `context`."""
    length = context - STEPS * (ROUNDS + 1) // 2
    if length < 1:
        raise ValueError(f"context must be more than {context - length} tokens, got {context}")
    return length


def measure(
    engine: str, version: str, head: str, activation: str, batch: int, context: int,
    step: Callable[[], object], new_tokens: int = 1,
) -> None:  # fmt: skip
    """Prints one line: the median over ROUNDS of a step's seconds, after a round to warm up.

    A prompt is read in one step, new_tokens of a row that has `context` before them.
    """
    times, steps = [], STEPS if new_tokens == 1 else 1
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        times.append((time.perf_counter() - start) / steps)
    seconds = statistics.median(times[1:])
    row = {
        "engine": engine, "version": version, "head": head, "activation": activation,
        "batch": batch, "context": context, "new_tokens": new_tokens,
        "step_ms": 1e3 * seconds, "tokens_per_second": batch * new_tokens / seconds,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
