"""The protocol of drafters: everything that sets one speculative method apart from another."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from specjax.params import Params
from specjax.state import DecodeState, Proposal, Verified


@runtime_checkable
class Drafter(Protocol):
    """A frozen dataclass registered as a pytree: arrays are leaves, choices are static.

    The loop calls `init` once after the prompt is in the cache, then `propose` and `observe` every
    round. All three are traced, so sizes are static.
    """

    @property
    def draft_length(self) -> int:
        """Tokens proposed per round, N."""

    def validate(self, params: Params) -> None:
        """Raises ValueError where the model cannot be drafted for in this way."""

    def init(self, params: Params, state: DecodeState) -> Any:
        """The drafter's own state, a pytree; None where it keeps nothing."""

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        """N tokens per row to follow `state.last_tokens`.

        The state comes back with what drafting changed: scratch slots of the cache (those at
        cache.lengths and above; the lengths themselves as they were) and `draft`.
        """

    def observe(self, draft: Any, verified: Verified) -> Any:
        """The drafter's state after the target has spoken."""
