"""QSpec: the same 4-bit weights draft with low-precision activations (Zhao et al., section 3.1).

Draft and verification share the weights and the KV cache. The weights of a nested model have two
planes (`pallas_kernels.nested`): the draft reads the 4-bit one, the verification the exact one. The
draft writes its entries past the committed ones; the verification, which reads the same tokens at
the same places, writes the precise entries over them. So nothing is held twice, and every later
draft reads a precise context.
"""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.activations import Activation
from specjax.checks import check_flag
from specjax.drafting.chain import LevelDrafter
from specjax.drafting.schedules import Schedule
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.speculation.state import DecodeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QSpec(LevelDrafter):
    """Drafts with quantized activations, verifies with 16-bit ones.

    draft_length: tokens per draft (the paper's γ).
    activation: "a8" or "a4", the draft's activation precision. "a4" is the paper's; here it is
        8-bit arithmetic on a coarser grid: never cheaper than "a8", and less is accepted.
    overwrite: False keeps the draft's own KV entries in a second cache, which the verification
        never corrects. It exists for the paper's ablation (table 2) alone.
    confidence: a row's draft ends with a token of smaller probability than this; None: never.
    schedule: how many of draft_length tokens to draft; None: all.
    window: the draft sees so many positions back, and the first four (StreamingLLM, section 3.2).
        Its cost then stays the same in any context. None: it sees all, as the verification does.

    Raises ValueError where a field is out of its range.
    """

    draft_length: int = jax.tree.static(default=3)
    activation: Activation = jax.tree.static(default="a8")
    overwrite: bool = jax.tree.static(default=True)
    confidence: float | None = jax.tree.static(default=None)
    schedule: Schedule | None = jax.tree.static(default=None)
    window: int | None = jax.tree.static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation == "a16":
            raise ValueError('activation of a draft must be "a8" or "a4": "a16" is the verifier\'s')
        check_flag("overwrite", self.overwrite)

    def validate(self, params: Params, positions: int) -> None:
        if not params.quantized:
            raise ValueError(
                "QSpec drafts with 4-bit weights, and params hold 16-bit ones alone: "
                "call specjax.quantize(params) first, or pass drafter=specjax.Autoregressive()"
            )

    @property
    def own_cache(self) -> bool:
        return not self.overwrite

    def first_cache(self, params: Params, state: DecodeState, width: int) -> KVCache:
        return state.cache
