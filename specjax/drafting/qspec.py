"""QSpec: the same 4-bit weights draft with low-precision activations (Zhao et al., section 3.1).

Draft and verification share the weights and the KV cache. The draft writes its entries past the
committed ones; the verification, which reads the same tokens at the same places, writes the precise
entries over them. So nothing is held twice, and every later draft reads a precise context.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activations import check_activation
from pallas_kernels.formats import Quantized
from specjax.checks import check_integer
from specjax.kv_cache import KVCache
from specjax.params import Params
from specjax.sampling import draw, greedy, probabilities
from specjax.state import DecodeState, Proposal, Verified
from specjax.transformer import forward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QSpec:
    """Drafts with quantized activations, verifies with 16-bit ones.

    draft_length: tokens per draft (the paper's γ).
    activation: "a8" or "a4", the draft's activation precision.
    overwrite: False keeps the draft's own KV entries in a second cache, which the verification
        never corrects. It exists for the paper's ablation (table 2) alone.

    Raises ValueError where a field is out of its range.
    """

    draft_length: int = dataclasses.field(default=3, metadata={"static": True})
    activation: str = dataclasses.field(default="a8", metadata={"static": True})
    overwrite: bool = dataclasses.field(default=True, metadata={"static": True})

    def __post_init__(self) -> None:
        if check_integer("draft_length", self.draft_length) < 1:
            raise ValueError(
                f"draft_length must be at least 1, got {self.draft_length}; "
                "Autoregressive() decodes without drafts"
            )
        check_activation(self.activation)
        if self.activation == "a16":
            raise ValueError('activation of a draft must be "a8" or "a4": "a16" is the verifier\'s')

    def validate(self, params: Params) -> None:
        if not any(isinstance(linear.weight, Quantized) for linear in params.linears()):
            raise ValueError(
                "QSpec drafts with 4-bit weights, and params hold 16-bit ones alone: "
                "call specjax.quantize(params) first, or pass drafter=specjax.Autoregressive()"
            )

    def init(self, params: Params, state: DecodeState) -> KVCache | None:
        return None if self.overwrite else state.cache

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        if self.overwrite:
            proposal, cache = self._draft(params, state, state.cache, self.draft_length)
            return proposal, dataclasses.replace(state, cache=cache)
        # A cache of its own needs the last draft's entry too, which no verification will write.
        own = state.draft.with_lengths(state.cache.lengths)
        proposal, own = self._draft(params, state, own, self.draft_length + 1)
        return proposal, dataclasses.replace(state, draft=own)

    def _draft(
        self, params: Params, state: DecodeState, cache: KVCache, passes: int
    ) -> tuple[Proposal, KVCache]:
        """`passes` greedy or sampled tokens per row, of which the first draft_length count."""

        def draft_one(carry, key):
            tokens, cache = carry
            logits, cache = forward(
                params, tokens[:, None], cache.lengths[:, None], cache, activation=self.activation
            )
            tokens, distribution = _choose(logits[:, 0], state, key)
            return (tokens, cache.with_lengths(cache.lengths + 1)), (tokens, distribution)

        keys = None
        if state.sampling is not None:
            keys = jax.vmap(lambda key: jax.random.split(key, passes), out_axes=1)(
                state.round_keys(purpose=0)
            )
        (_, after), drafted = lax.scan(draft_one, (state.last_tokens, cache), keys, length=passes)
        tokens, distributions = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 1)[:, : self.draft_length], drafted
        )
        return Proposal(tokens, distributions), after.with_lengths(cache.lengths)

    def observe(self, draft: KVCache | None, verified: Verified) -> KVCache | None:
        return draft


def _choose(
    logits: jax.Array, state: DecodeState, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The next draft of each row, and the distribution it was drawn from. logits: f32[B, V]."""
    if state.sampling is None:
        return greedy(logits), None
    assert keys is not None
    distribution = probabilities(logits, state.sampling)
    return draw(keys, distribution), distribution
