"""Compares a model's predictions at two activation precisions (QSpec section 2.2, figure 2).

The precise model writes, and the other precision reads the text in one pass. Its most probable
token at each place, and its probability of the precise model's token, show how often drafts will be
accepted, without any drafting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Activation, check_activation
from specjax.drafting import Autoregressive
from specjax.evaluation.scoring import score_tokens
from specjax.generation.decoding import decode
from specjax.model.params import Params


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """One entry per generated token, over all prompts.

    precise, drafted: f32[n], the token's probabilities under "a16" and under the draft's
        activation precision.
    accepted: bool[n], whether the token is the draft's most probable one.
    """

    precise: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    def summary(self) -> dict[str, float]:
        """Shares of tokens, and the mean difference of their probabilities."""
        return {
            "tokens": len(self.precise),
            "accepted": float(self.accepted.mean()),
            "both above 0.8": float(((self.precise > 0.8) & (self.drafted > 0.8)).mean()),
            "accepted where both are above 0.8": _share(
                self.accepted, (self.precise > 0.8) & (self.drafted > 0.8)
            ),
            "mean difference of probabilities": float(np.abs(self.precise - self.drafted).mean()),
        }


def fidelity(
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    activation: Activation = "a4",
    max_new_tokens: int = 128,
    rows: int = 8,
) -> Fidelity:
    """Compares a quantized model's predictions under "a16" and under `activation`.

    Args:
      params: a quantized model.
      prompts: token ids of every prompt.
      activation: the draft's activation precision, "a8" or "a4".
      max_new_tokens: most tokens that the precise model writes after each prompt.
      rows: prompts per pass.

    Returns:
      Probabilities and agreement for every token that was written.

    Raises:
      ValueError: an argument is out of its range.
    """
    check_activation(activation)
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if len(prompts) == 0:
        raise ValueError("prompts must hold at least one prompt, got none")
    parts = [
        _compare(params, prompts[first : first + rows], activation, max_new_tokens)
        for first in range(0, len(prompts), rows)
    ]
    return Fidelity(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _compare(
    params: Params, prompts: Sequence[Sequence[int]], activation: Activation, max_new_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    prompts = [list(prompt) for prompt in prompts]
    result = decode(params, prompts, max_new_tokens=max_new_tokens, drafter=Autoregressive())
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    places = np.arange(1, tokens.shape[1])
    starts = np.array([len(prompt) for prompt in prompts])
    written = (places >= starts[:, None]) & (places < lengths[:, None])
    precise, _ = score_tokens(params, jnp.asarray(tokens))
    drafted, best = score_tokens(params, jnp.asarray(tokens), activation=activation)
    probabilities = (np.exp(np.asarray(x))[written] for x in (precise, drafted))
    return *probabilities, (np.asarray(best) == tokens[:, 1:])[written]


def _share(chosen: np.ndarray, among: np.ndarray) -> float:
    return float(chosen[among].mean()) if among.any() else float("nan")
