"""Plain decoding: the drafter that proposes nothing.

The same loop, kernels and cache as every other drafter, which makes comparisons fair and outputs
comparable bit for bit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.params import Params
from specjax.state import DecodeState, Proposal, Verified


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One token per target pass."""

    @property
    def draft_length(self) -> int:
        return 0

    def validate(self, params: Params) -> None:
        """Every model can be decoded so."""

    def init(self, params: Params, state: DecodeState) -> None:
        return None

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        rows = state.tokens.shape[0]
        distributions = None
        if state.sampling is not None:
            distributions = jnp.zeros((rows, 0, params.config.vocab_size))
        return Proposal(jnp.zeros((rows, 0), jnp.int32), distributions), state

    def observe(self, draft: None, verified: Verified) -> None:
        return None
