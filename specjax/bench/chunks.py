"""Prompts in batches, padded as `decode` pads them, so that like lengths share a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.generation.rows import bucket


class Chunk(NamedTuple):
    """Prompts that are decoded together.

    tokens: int32[B, T], right-padded.
    lengths: int32[B].
    """

    tokens: np.ndarray
    lengths: jax.Array

    @property
    def width(self) -> int:
        """Tokens of a padded prompt, T."""
        return int(self.tokens.shape[1])


def chunks(prompts: Sequence[Sequence[int]], rows: int, widest: int) -> list[Chunk]:
    """Cuts prompts into batches of `rows`, in order. Prompts that fill no batch are left out.

    widest: tokens up to which prompts are padded.
    """
    return [
        _padded(prompts[first : first + rows], widest)
        for first in range(0, len(prompts) - rows + 1, rows)
    ]


def _padded(prompts: Sequence[Sequence[int]], widest: int) -> Chunk:
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    tokens = np.zeros((len(prompts), max(longest, min(bucket(longest), widest))), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return Chunk(tokens, jnp.array(lengths, jnp.int32))
