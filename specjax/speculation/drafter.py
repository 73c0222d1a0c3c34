"""The protocol of drafters: everything that sets one speculative method apart from another."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from specjax.model.params import Params
from specjax.speculation.state import DecodeState, Proposal, Stats, Verified


@runtime_checkable
class Drafter(Protocol):
    """A frozen dataclass registered as a pytree: arrays are leaves, choices are static.

    The loop calls `init` once after the prompt is in the cache, then `propose` and `observe` every
    round. All three are traced, so sizes are static.
    """

    @property
    def draft_length(self) -> int:
        """The most tokens proposed per round, N."""

    def validate(self, params: Params, positions: int) -> None:
        """Raises ValueError where the model cannot be drafted for in this way.

        positions: tokens per row that decoding may reach.
        """

    def init(self, params: Params, state: DecodeState, width: int) -> Any:
        """The drafter's own state, a pytree; None where it keeps nothing.

        width: the prompts end within the first `width` of the state's tokens.
        """

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        """Tokens to follow `state.last_tokens`.

        `params` is the model that will verify them: the target, or the level above. The state comes
        back with what drafting changed: scratch slots of the cache (those at cache.lengths and
        above; the lengths themselves as they were) and `draft`.
        """

    def observe(self, draft: Any, verified: Verified) -> Any:
        """The drafter's state after the target has spoken."""

    def levels(self, draft: Any) -> tuple[Stats, ...]:
        """Counts of the drafter's own rounds of draft and verification, the upper levels first."""
