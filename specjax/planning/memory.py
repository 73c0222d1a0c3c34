"""Plans the memory of decoding, in bytes: weights, KV caches and a pass's intermediates.

The terms are those of the article's memory_budget ("Memory Budget: Co-Locating Draft and Target").
In place of parameters · bits / 8 they count the bytes that this library really holds: scales,
padding, weights that stay in 16 bits, and arrays that draft and target share.
"""

from __future__ import annotations

import dataclasses

from specjax.model.config import ModelConfig
from specjax.model.sizes import (
    activation_bytes,
    cache_bytes,
    check_counts,
    check_format,
    weight_bytes,
    weight_sizes,
)
from specjax.model.weight_names import HEAD


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes held while decoding.

    target, draft: weights; the draft's without the arrays it shares with the target.
    target_cache, draft_cache: KV caches.
    activations: the intermediates of the largest pass.
    """

    target: int
    draft: int
    target_cache: int
    draft_cache: int
    activations: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(dataclasses.astuple(self))


def plan_memory(
    config: ModelConfig,
    weights: str = "plain",
    *,
    draft: str | None = None,
    draft_config: ModelConfig | None = None,
    share_cache: bool = False,
    group_size: int | None = 128,
    lm_head: bool = False,
    rows: int = 1,
    context: int = 4096,
    prompt: int | None = None,
    cache_bits: int = 16,
    draft_length: int = 5,
) -> Memory:
    """Computes the bytes that decoding with a target and its draft holds.

    Args:
      config, weights: the target, and its format as for `weight_bytes`.
      draft: the draft's format; None: no draft.
      draft_config: the drafting model; None: a cast of the target, which shares its embedding and
        final norm, and its head unless `lm_head`.
      share_cache: a cast drafts from the target's own KV cache.
      group_size: inputs per scale, of both.
      lm_head: whether the draft's head is quantized too.
      rows: sequences at a time.
      context: tokens per sequence, prompt and output.
      prompt: tokens of the prompt, which is read in one pass; None: all.
      cache_bits: bits per KV cache entry, 16, 8 or 4.
      draft_length: the most drafts per round; the verifying pass reads one token more.

    Returns:
      The bytes, by what they are for.

    Raises:
      ValueError: an argument is out of its range, or one of the draft's is given without a draft.
    """
    prompt = context if prompt is None else prompt
    check_counts(context=context, draft_length=draft_length, prompt=prompt)
    slots = context + draft_length
    sizes = {"target": weight_bytes(config, weights, group_size=group_size)}
    sizes["target_cache"] = cache_bytes(config, rows, slots, cache_bits)
    sizes["draft"] = sizes["draft_cache"] = 0
    model = config if draft_config is None else draft_config
    if draft is None and (draft_config is not None or share_cache):
        raise ValueError(
            "draft must name the draft's format where draft_config or share_cache is given"
        )
    if share_cache and draft_config is not None:
        raise ValueError("share_cache is for a cast of the target: leave draft_config out")
    if draft is not None:
        check_format(draft, group_size)
        parts = weight_sizes(model, draft, group_size, lm_head)
        if draft_config is None:
            own = {HEAD} if lm_head else set()
            parts = {n: b for n, b in parts.items() if n.startswith("layers.") or n in own}
        sizes["draft"] = sum(parts.values())
        sizes["draft_cache"] = 0 if share_cache else cache_bytes(model, rows, slots, cache_bits)
    passes = [
        max(
            activation_bytes(each, rows, draft_length + 1),
            activation_bytes(each, rows, prompt, logits=False),
        )
        for each in (config, model)
    ]
    return Memory(**sizes, activations=max(passes))
