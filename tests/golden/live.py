"""Compares specjax with transformers without stored files: `python -m tests.golden.live [seed]`.

The same cases with other weights and prompts, drawn from the seed. One line per case; the exit
status is 1 if one of them differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.utils import logging

import specjax
from checkpoints_tools.loading import load
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.model.transformer import forward
from tests.golden import reference
from tests.golden.cases import CASES, NEW_TOKENS, Case

TOLERANCE = 1e-4  # as in tests/model/test_families.py


def main(seed: int) -> int:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    agreed = [compare(name, case, seed) for name, case in CASES.items()]
    return 0 if all(agreed) else 1


def compare(name: str, case: Case, seed: int) -> bool:
    """Whether logits are within the tolerance and the greedy tokens the same."""
    model, prompts = reference.make(case, seed)
    with tempfile.TemporaryDirectory() as directory:
        reference.save(model, Path(directory), stop=[0])
        params = load(directory)
    tokens = reference.padded(prompts, max(case.lengths))
    expected = reference.padded_logits(model, prompts)
    difference = logit_difference(params, tokens, expected, case.lengths)
    scale = float(np.abs(expected).max())
    greedy = [reference.greedy(model, prompt) for prompt in prompts]
    same = np.array_equal(continuations(params, tokens, case.lengths), torch.stack(greedy))
    print(f"{name}: logits to {scale:.1f} differ by {difference:.1e}, same tokens: {same}")
    return same and difference <= TOLERANCE * max(1, scale / 10)


def logit_difference(
    params: Params, tokens: np.ndarray, expected: np.ndarray, lengths: tuple[int, ...]
) -> float:
    """Largest absolute difference. tokens: int32[B, T], expected: f32[B, T, V]."""
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    cache = KVCache.create(params.config, rows, width)
    logits, _ = jax.jit(forward)(params, tokens, positions, cache)
    valid = np.arange(width) < np.array(lengths)[:, None]
    return float(np.abs(np.asarray(logits) - expected)[valid].max())


def continuations(params: Params, tokens: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Returns the tokens that plain decoding adds to each prompt: int32[B, NEW_TOKENS]."""
    result = specjax.decode(
        params,
        tokens,
        prompt_lengths=lengths,
        drafter=specjax.Autoregressive(),
        max_new_tokens=NEW_TOKENS,
        stop_tokens=(),
    )
    rows = zip(np.asarray(result.tokens), lengths, strict=True)
    return np.stack([row[length : length + NEW_TOKENS] for row, length in rows])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
