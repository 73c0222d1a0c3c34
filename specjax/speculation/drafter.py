"""The base of all drafters: everything that sets one speculative method apart from another."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jaxtyping import Array, Int32

from specjax.checks import shown
from specjax.model.params import Params
from specjax.speculation.state import DecodeState, Proposal, Stats, Verified


class Drafter(abc.ABC):
    """Proposes tokens for a model to verify.

    A drafter is a frozen dataclass that derives from this class and is registered as a pytree:
    arrays are leaves, and choices that change the program are static fields. It needs
    `draft_length`, as a field or a property, and `propose`. It overrides the other methods where
    it keeps a state or has something to check.

    Decoding calls `validate`, then `init` once the prompts are in the cache, then `propose` and
    `observe` every round; `learn` gets the prompts' tokens, then those of every round. JAX traces
    all but `validate`, so sizes are static.

    inside: the names of the fields that hold drafters.
    """

    inside: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # an abstract property would stand in the way of a field

        @property
        def draft_length(self) -> int:
            """The most tokens proposed per round, N."""

    @property
    def reach(self) -> int:
        """Slots of the KV cache behind a row's text that a round may write: at least N."""
        return self.draft_length

    @property
    def skippable(self) -> bool:
        """Whether a round may pass with another proposal, without `propose` and `observe`."""
        return True

    def validate(self, params: Params, positions: int) -> None:  # noqa: B027 - nothing to refuse
        """Checks that the drafter can draft for a model.

        Args:
          params: the model that will verify.
          positions: tokens per row that decoding may reach.

        Raises:
          ValueError: it cannot.
        """

    def init(self, params: Params, state: DecodeState, width: int) -> Any:
        """Returns the drafter's own state before the first round.

        Args:
          params: the model that will verify.
          state: the decoding state; its `draft` is not set yet.
          width: the prompts end within the first `width` of the state's tokens.

        Returns:
          A pytree of arrays, whose first axis is the rows, and of KV caches. None where the drafter
          keeps nothing, which is the default.
        """
        return None

    @abc.abstractmethod
    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        """Proposes tokens to follow `state.last_tokens`.

        Args:
          params: the model that will verify them: the target, or the level above.
          state: the decoding state; `state.draft` is the drafter's own.

        Returns:
          The proposal, and the state with what drafting changed. It may change `draft` and scratch
          slots of the cache, at `cache.lengths` and above, but not the lengths themselves.
        """

    def observe(self, draft: Any, verified: Verified) -> Any:
        """Returns the drafter's own state after a round. By default it stays as it is.

        Args:
          draft: the drafter's own state.
          verified: what the model made of the proposal.
        """
        return draft

    def rest(self, draft: Any) -> tuple[Int32[Array, ""] | None, Any]:
        """Returns how many rounds `decode` makes without the drafter before the next proposal.

        Args:
          draft: the drafter's own state after a round.

        Returns:
          int32[], and the drafter's own state after those rounds. None, which is the default: never
          any.
        """
        return None, draft

    def shared(self) -> Any:
        """Returns what the drafter keeps for all rows together, before any prompt.

        Returns:
          A pytree without an axis of rows; `state.shared` is it from then on. None where the
          drafter keeps nothing, which is the default.
        """
        return None

    def learn(
        self,
        shared: Any,
        tokens: Int32[Array, "B W"],
        begins: Int32[Array, " B"],
        ends: Int32[Array, " B"],
    ) -> Any:
        """Returns what all rows share, after tokens came: a prompt's, or a round's.

        Args:
          shared: what they shared before.
          tokens: int32[B, W], the texts of the rows.
          begins, ends: int32[B], the new tokens of each are at places begins … ends - 1.
        """
        return shared

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the drafter's parts, if it has several that take turns."""
        return ()

    def source(self, draft: Any) -> Int32[Array, " B"] | None:
        """Returns which of `sources` each row's last proposal came from, int32[B]; None without."""
        return None

    def levels(self, draft: Any) -> tuple[Stats, ...]:
        """Returns counts of the drafter's own rounds of draft and verification, if it has any.

        The upper levels come first.
        """
        return ()


def check_is_drafter(drafter: object, name: str = "drafter") -> None:
    """Raises ValueError unless `drafter` is a complete `Drafter`; `name` is what it is called."""
    if not isinstance(drafter, Drafter):
        message = f"{name} must be a drafter such as specjax.QSpec(), got {shown(drafter)}"
        if isinstance(drafter, str):
            message += ": specjax.drafting.make makes one from its name"
        elif isinstance(drafter, type) and issubclass(drafter, Drafter):
            message += f": write {drafter.__name__}(…)"
        if hasattr(drafter, "propose") and not isinstance(drafter, type):
            methods = [method for method in vars(Drafter) if not method.startswith("_")]
            lacking = ", ".join(method for method in methods if not hasattr(drafter, method))
            message += f", which lacks {lacking}: derive its class from specjax.Drafter"
        raise ValueError(message)
    own = type(drafter).__name__
    for field in drafter.inside:
        article = "an" if own[0] in "AEIOU" else "a"
        check_is_drafter(getattr(drafter, field), f"{field} of {article} {own}")
    if not hasattr(drafter, "draft_length"):
        raise ValueError(f"{name} must have a draft_length, and {own} has none")
    leaves = jax.tree.leaves(drafter)
    if len(leaves) == 1 and leaves[0] is drafter:
        raise ValueError(
            f"{name} must be a pytree, and {own} is none: register its class by "
            "jax.tree_util.register_dataclass"
        )
