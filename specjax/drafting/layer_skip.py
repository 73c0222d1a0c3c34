"""Layer skipping: the target drafts with some of its layers.

The draft shares the weights and the KV cache. It reads the entries of its own layers alone; those
of the layers that it skipped are written by the verification, together with all the others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import TypedDict, Unpack

import jax

from pallas_kernels.activations import Activation
from specjax.checks import check_integer, shown
from specjax.drafting.chain import LevelDrafter
from specjax.drafting.schedules import Schedule
from specjax.model.params import Params


class _Options(TypedDict, total=False):
    """The fields of `LayerSkip` beside its layers."""

    draft_length: int
    activation: Activation
    confidence: float | None
    schedule: Schedule | None
    window: int | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerSkip(LevelDrafter):
    """Drafts with a subset of the target's layers.

    layers: their numbers, in order; `specjax.planning.search_layers` finds some, and `skipping`
        has three sets that need no search.
    draft_length: the most tokens per draft.
    activation: the draft's activation precision; "a8" and "a4" combine skipping with QSpec.
    confidence: a row's draft ends with a token of smaller probability than this; None: never.
    schedule: how many of draft_length tokens to draft; None: all.
    window: the draft sees so many positions back, and the first four (StreamingLLM, section 3.2).
        Its cost then stays the same in any context. None: it sees all, as the verification does.

    Raises ValueError where a field is out of its range.
    """

    layers: tuple[int, ...] = jax.tree.static()
    draft_length: int = jax.tree.static(default=3)
    activation: Activation = jax.tree.static(default="a16")
    confidence: float | None = jax.tree.static(default=None)
    schedule: Schedule | None = jax.tree.static(default=None)
    window: int | None = jax.tree.static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.layers, Iterable):
            raise ValueError(f"layers must be layer numbers, such as (0, 2), got {self.layers!r}")
        layers = tuple(check_integer("a layer", layer) for layer in self.layers)
        object.__setattr__(self, "layers", layers)  # lists are unhashable
        if not layers or any(low >= high for low, high in itertools.pairwise(layers)):
            raise ValueError(f"layers must be rising layer numbers, at least one, got {layers}")

    @classmethod
    def skipping(cls, params: Params, skipped: str, **options: Unpack[_Options]) -> LayerSkip:
        """Drafts without some layers that need no search (the article, "Layer-Skipping Draft").

        Args:
          params: the model.
          skipped: "first half"; "last half", which leaves layers 0 … L // 2 - 1; or "alternate",
            which leaves layers 1, 3, 5 …
          options: the other fields.

        Returns:
          The drafter.

        Raises:
          ValueError: `skipped` is none of them, no layer is left, or a field is out of its range.
        """
        count = params.config.num_layers
        left = {
            "first half": range(count // 2, count),
            "last half": range(count // 2),
            "alternate": range(1, count, 2),
        }
        if skipped not in left:
            raise ValueError(f"skipped must be one of {', '.join(left)}, got {shown(skipped)}")
        return cls(tuple(left[skipped]), **options)

    def validate(self, params: Params, positions: int) -> None:
        count = params.config.num_layers
        if self.layers[0] < 0 or self.layers[-1] >= count:
            raise ValueError(f"layers must be in 0 … {count - 1}, the model's, got {self.layers}")
