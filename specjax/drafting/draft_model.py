"""A second model drafts: a smaller one, or the target's own weights quantized.

A quantized cast of the target (ML-SpecQD, section III) reads a quarter of its bytes, which is what
counts where memory bounds the pass. It may share the target's KV cache, as QSpec's draft does: its
entries are overwritten by the verification, and it drafts from the target's own. A model of another
shape keeps a cache of its own.
"""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.activations import Activation
from specjax.drafting.chain import LevelDrafter, check_draft_params
from specjax.drafting.schedules import Schedule
from specjax.model.config import ModelConfig
from specjax.model.params import Params

_CACHE_FIELDS = (
    "num_layers", "num_kv_heads", "head_dim", "rope_theta", "rope_scaling", "hadamard", "dtype",
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModel(LevelDrafter):
    """Drafts with another model of the same tokenizer; its vocabulary may be padded differently.

    params: the drafting model, for example `specjax.quantize(target, "mxfp4")`.
    draft_length: the most tokens per draft.
    activation: the draft's activation precision.
    share_cache: draft from the target's KV cache. For a draft made of the target's own weights.
    confidence: a row's draft ends with a token of smaller probability than this; None: never.
    schedule: how many of draft_length tokens to draft; None: all.
    window: the draft sees so many positions back, and the first four (StreamingLLM, section 3.2).
        Its cost then stays the same in any context. None: it sees all, as the verification does.

    Raises ValueError where a field is out of its range.
    """

    params: Params = dataclasses.field(repr=False)
    draft_length: int = jax.tree.static(default=5)
    activation: Activation = jax.tree.static(default="a16")
    share_cache: bool = jax.tree.static(default=False)
    confidence: float | None = jax.tree.static(default=None)
    schedule: Schedule | None = jax.tree.static(default=None)
    window: int | None = jax.tree.static(default=None)

    @property
    def own_cache(self) -> bool:
        return not self.share_cache

    def model(self, params: Params) -> Params:
        return self.params

    def validate(self, params: Params, positions: int) -> None:
        check_draft_params(self, self.params)
        config = self.params.config
        if self.share_cache:
            _check_same_cache(config, params.config)
        if positions > config.max_position_embeddings:
            raise ValueError(
                f"prompt and max_new_tokens make {positions} positions; the draft model has "
                f"{config.max_position_embeddings}"
            )


def _check_same_cache(draft: ModelConfig, target: ModelConfig) -> None:
    for field in _CACHE_FIELDS:
        ours, theirs = getattr(draft, field), getattr(target, field)
        if ours != theirs:
            raise ValueError(
                f"share_cache needs a draft made of the target's weights: {field} is {ours!r} in "
                f"the draft model and {theirs!r} in the target"
            )
