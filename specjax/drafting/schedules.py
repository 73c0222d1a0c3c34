"""Draft lengths: a limit per row and round, chosen from the acceptance of earlier drafts.

A drafter's `draft_length` is the maximum. Without a schedule every round drafts that many tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.row_sums import running_sums
from specjax.checks import check_number, shown
from specjax.speculation.state import Verified


class Schedule(Protocol):
    """A frozen dataclass registered as a pytree. Its state is a pytree of [B, …] arrays."""

    def init(self, rows: int, longest: int) -> Any:
        """Returns the state before the first round."""

    def lengths(self, state: Any, longest: int) -> Int32[Array, " B"]:
        """Returns the tokens to draft now, int32[B] in 1 … longest."""

    def update(self, state: Any, verified: Verified) -> Any:
        """Returns the state after a round."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heuristic:
    """Drafts two tokens more after a fully accepted draft, and one less after any other.

    This is the rule of Hugging Face's assisted generation. It begins with 5.
    """

    def init(self, rows: int, longest: int) -> Int32[Array, " {rows}"]:
        return jnp.full(rows, min(5, longest), jnp.int32)

    def lengths(self, state: Int32[Array, " B"], longest: int) -> Int32[Array, " B"]:
        return state

    def update(self, state: Int32[Array, " B"], verified: Verified) -> Int32[Array, " B"]:
        longest = verified.proposed.shape[1]
        whole = verified.accepted >= verified.drafted
        moved = jnp.clip(jnp.where(whole, state + 2, state - 1), 1, longest)
        return jnp.where(verified.count == 0, state, moved)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Chooses the length with the most expected tokens per second, from the acceptance so far.

    With α the probability that a draft is kept given that those before it were, n drafts gain
    (1 - αⁿ⁺¹) / (1 - α) tokens (Leviathan et al. 2023, equation 1) and take n · draft_cost +
    1 + n · row_cost of the time of a plain pass.

    draft_cost: the time of a draft pass, in target passes.
    row_cost: the time that every draft adds to the verifying pass, in target passes.
    memory: the number of recent drafts, roughly, over which α is averaged.

    Raises ValueError if a field is out of its range. `specjax.planning` measures the costs.
    """

    draft_cost: float = jax.tree.static(default=0.25)
    row_cost: float = jax.tree.static(default=0.02)
    memory: float = jax.tree.static(default=64.0)

    def __post_init__(self) -> None:
        for name in ("draft_cost", "row_cost"):
            if not 0 <= check_number(name, getattr(self, name)) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        if not 1 <= check_number("memory", self.memory) < float("inf"):
            raise ValueError(f"memory must be at least 1 draft, got {self.memory!r}")

    def init(self, rows: int, longest: int) -> Float32[Array, "{rows} 2"]:
        """f32[B, 2]: recent drafts kept and tested, as if 9 of 10 had been kept before: what the
        target's own casts get."""
        return jnp.tile(jnp.array([9.0, 10.0]), (rows, 1))

    def lengths(self, state: Float32[Array, "B 2"], longest: int) -> Int32[Array, " B"]:
        kept = (state[:, 0] / state[:, 1])[:, None]
        n = jnp.arange(1, longest + 1)
        gain = 1 + running_sums(kept**n)
        cost = 1 + n * (self.draft_cost + self.row_cost)
        return (jnp.argmax(gain / cost, axis=1) + 1).astype(jnp.int32)

    def update(self, state: Float32[Array, "B 2"], verified: Verified) -> Float32[Array, "B 2"]:
        tested = verified.tested
        fade = (1 - 1 / self.memory) ** tested[:, None]
        moved = state * fade + jnp.stack((verified.accepted, tested), axis=1)
        return jnp.where((verified.count == 0)[:, None], state, moved)


def check_schedule(schedule: object) -> None:
    """Raises ValueError unless `schedule` has the methods of a `Schedule`, or is None."""
    lacking = [name for name in ("init", "lengths", "update") if not hasattr(schedule, name)]
    if schedule is not None and (lacking or isinstance(schedule, type)):
        raise ValueError(
            f"schedule must be a schedule such as specjax.Adaptive() or None, got {shown(schedule)}"
        )
