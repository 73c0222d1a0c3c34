"""Compares the logits of SmolLM2's GGUF file with those of transformers on torch.

transformers reads the same file with its own loader, dequantizes it and computes in float32. The
text is WikiText-2's validation text in disjoint windows. "near tie" is the distance of the two
largest logits of transformers where its first choice differs from ours, the largest of them: a
difference beyond rounding would differ at wider distances too.

    python -m benchmarks.exactness.logits --peer PYTHON --json OUT

`--peer` names the Python of an environment that `benchmarks/peers/install.sh` makes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.support.common import ROOT, parser, table, write
from benchmarks.support.instruct import MODEL
from checkpoints_tools.sources import locate
from specjax.model.kv_cache import KVCache
from specjax.model.transformer import forward


def main() -> int:
    options = _options()
    text = (options.data / "texts" / "wikitext2_valid.txt").read_text()
    ids = specjax.load_tokenizer(MODEL).encode(text)[: options.windows * options.window]
    tokens = np.asarray(ids, np.int32).reshape(options.windows, options.window)
    expected, versions = _peer(options.peer, tokens)
    exact = specjax.load(MODEL, dtype="float32")
    models = {
        "as in the file, float32": exact,
        "dequantized, float32": specjax.dequantize(exact),
        "as in the file, bfloat16": specjax.load(MODEL),
    }
    rows = [
        {"model": name, "peer": versions, **_compare(_logits(params, tokens), expected)}
        for name, params in models.items()
    ]
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return 0


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--peer", required=True, help="the Python that has torch and transformers")
    add("--windows", type=int, default=4)
    add("--window", type=int, default=512, help="tokens in each")
    return parse.parse_args()


def _peer(python: str, tokens: np.ndarray) -> tuple[np.ndarray, str]:
    """transformers' logits, f32[B, T, V], and the versions that computed them."""
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder) / "tokens.npy", Path(folder) / "logits.npy"
        np.save(given, tokens)
        module = "benchmarks.peers.transformers_logits"
        command = [python, "-m", module, str(locate(MODEL)), str(given), str(got)]
        printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return np.load(got), printed.stdout.splitlines()[-1]


def _logits(params: specjax.Params, tokens: np.ndarray) -> np.ndarray:
    """f32[B, T, V], a window at a time."""
    width = tokens.shape[1]
    run, positions = jax.jit(forward), jnp.arange(width)[None]
    cache = KVCache.create(params.config, 1, width)
    return np.concatenate([run(params, row[None], positions, cache)[0] for row in tokens])


def _compare(ours: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    differs = ours.argmax(-1) != expected.argmax(-1)
    largest = -np.partition(-expected, 1, axis=-1)[..., :2]
    gaps = (largest[..., 0] - largest[..., 1])[differs]
    return {
        "positions": differs.size,
        "same_first_choice": int((~differs).sum()),
        "largest_difference": float(np.abs(ours - expected).max()),
        "largest_logit": float(np.abs(expected).max()),
        "near_tie": float(gaps.max()) if gaps.size else 0.0,
    }


if __name__ == "__main__":
    sys.exit(main())
