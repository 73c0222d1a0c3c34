"""Plain decoding: the drafter that proposes nothing.

The same loop, kernels and cache as every other drafter, which makes comparisons fair and outputs
comparable bit for bit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.state import DecodeState, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Autoregressive(Drafter):
    """One token per target pass."""

    @property
    def draft_length(self) -> int:
        return 0

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        return Proposal(jnp.zeros((state.tokens.shape[0], 0), jnp.int32)), state
