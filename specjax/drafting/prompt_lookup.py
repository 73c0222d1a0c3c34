"""Prompt lookup: the tokens that followed an earlier occurrence of the last tokens (Saxena 2023).

It needs neither a model nor a memory: every round searches the whole text so far at once. It pays
if the output repeats the input, as in summaries, edits and questions about a text.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.checks import check_integer
from specjax.drafting.suffix import shared_run
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup(Drafter):
    """Proposes the tokens after an earlier occurrence of the last tokens in prompt and output.

    The drafter finds the longest run of last tokens that occurs, and takes its first occurrence.

    draft_length: tokens per draft; fewer if the text ends first.
    longest, shortest: tokens of the run to search for. Hugging Face tries 2, then 1.
    whole: take only occurrences that a whole draft follows and that end before the searched run
        begins, as the original implementation does; False: Hugging Face's rule.

    Raises ValueError where a field is out of its range.
    """

    draft_length: int = jax.tree.static(default=10)
    longest: int = jax.tree.static(default=3)
    shortest: int = jax.tree.static(default=1)
    whole: bool = jax.tree.static(default=False)

    def __post_init__(self) -> None:
        for name in ("draft_length", "shortest"):
            if check_integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if check_integer("longest", self.longest) < self.shortest:
            raise ValueError(
                f"longest must be at least shortest={self.shortest}, got {self.longest}"
            )

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        lengths = state.lengths[:, None]
        width = state.tokens.shape[1]
        run = shared_run(state.tokens, state.lengths, self.longest)
        last = jnp.arange(width)  # where an occurrence ends
        n = jnp.arange(self.longest, self.shortest - 1, -1)[:, None]
        found = (run[:, None] >= n) & (last < lengths - 1)[:, None]  # [B, n, W]
        if self.whole:
            found &= (last + self.draft_length < lengths)[:, None]
            found &= last < lengths[..., None] - 1 - n
        any_found = jnp.any(found, axis=2)
        best = jnp.argmax(any_found, axis=1)[:, None, None]
        start = jnp.argmax(jnp.take_along_axis(found, best, axis=1)[:, 0], axis=1)[:, None] + 1
        places = start + jnp.arange(self.draft_length)
        tokens = jnp.take_along_axis(state.tokens, jnp.minimum(places, width - 1), axis=1)
        follow = jnp.minimum(state.lengths - start[:, 0], self.draft_length)
        counts = jnp.where(jnp.any(any_found, axis=1), follow, 0)
        return Proposal(tokens, counts), state
