"""Plain decoding: the drafter that proposes nothing.

The same loop, kernels and cache as every other drafter, which makes comparisons fair and outputs
comparable bit for bit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.model.params import Params
from specjax.speculation.state import DecodeState, Proposal, Stats, Verified


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One token per target pass."""

    @property
    def draft_length(self) -> int:
        return 0

    def validate(self, params: Params, positions: int) -> None:
        """Every model can be decoded so."""

    def init(self, params: Params, state: DecodeState, width: int) -> None:
        return None

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        return Proposal(jnp.zeros((state.tokens.shape[0], 0), jnp.int32)), state

    def observe(self, draft: None, verified: Verified) -> None:
        return None

    def levels(self, draft: None) -> tuple[Stats, ...]:
        return ()
