"""Plans the memory of decoding, in bytes: weights, KV caches and a pass's intermediates.

The terms are those of the article's memory_budget ("Memory Budget: Co-Locating Draft and Target").
In
place of parameters · bits / 8 they count the bytes that this library really holds: scales, padding,
weights that stay in 16 bits, and arrays that draft and target share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from pallas_kernels.attention import BLOCK
from pallas_kernels.cache_entries import check_cache_bits
from pallas_kernels.formats import MXFP4_GROUP, check_group_size, padded_inputs
from specjax.checks import check_integer
from specjax.model.config import ModelConfig
from specjax.model.weight_names import HEAD, is_block_matrix, weight_shapes

FORMATS = ("plain", "int4", "int8", "mxfp4")
_SCALE_BYTES = 2  # bfloat16
_ENTRY_BYTES = 5  # a float32 scale and an 8-bit zero per quantized entry


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


def weight_bytes(
    config: ModelConfig,
    weights: str = "plain",
    *,
    group_size: int | None = 128,
    lm_head: bool = False,
) -> int:
    """Computes the bytes of a model's weights, `Params.nbytes`, without making any.

    Args:
      config: the model. If its head is the embedding (tied), `lm_head` quantizes a copy.
      weights: the format of the blocks' matrices: "plain" (the model's own 16 or 32 bits), "int4"
          (rtn, gptq …), "int8" or "mxfp4". Embeddings, norms and biases are plain always.
      group_size: inputs per scale of "int4" and "int8".
      lm_head: whether the head has that format too.

    Returns:
      Bytes.

    Raises:
      ValueError: an unknown format or group size.
    """
    _check_format(weights, group_size)
    return sum(_weight_sizes(config, weights, group_size, lm_head).values())


def cache_bytes(config: ModelConfig, rows: int, slots: int, bits: int = 16) -> int:
    """Bytes of a KV cache: 2 · layers · heads · head_dim · slots · rows · bytes per entry.

    Slots come in whole blocks; entries of 8 or 4 bits have a scale and a zero per slot and head.
    Raises ValueError where an argument is out of its range.
    """
    check_cache_bits(bits)
    _check_counts(rows=rows, slots=slots)
    vectors = 2 * config.num_layers * rows * (-(-slots // BLOCK) * BLOCK) * config.num_kv_heads
    if bits == 16:
        return vectors * config.head_dim * _plain_bytes(config)
    return vectors * (config.head_dim * bits // 8 + _ENTRY_BYTES)


def activation_bytes(config: ModelConfig, rows: int, tokens: int, *, logits: bool = True) -> int:
    """Estimates the bytes of the intermediates of one pass over `tokens` tokens per row.

    The largest moment counts: a block's residual stream with the float32 products of its attention
    or
    its feed-forward, or the float32 logits after the last block, which a pass over a prompt does
    not
    compute.
    """
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    inside = 8 * config.hidden_size + 4 * max(2 * heads, 3 * config.intermediate_size)
    outside = 4 * (config.vocab_size + config.hidden_size) if logits else 0
    return rows * tokens * max(inside, outside)


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
      draft_config: the drafting model; None: a cast of the target, which shares its embedding,
        norms and biases, and its head unless `lm_head`.
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
    _check_counts(context=context, draft_length=draft_length, prompt=prompt)
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
        _check_format(draft, group_size)
        parts = _weight_sizes(model, draft, group_size, lm_head)
        if draft_config is None:
            parts = {
                n: b for n, b in parts.items() if is_block_matrix(n) or (n == HEAD and lm_head)
            }
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


def most_that_fits(device: int, needed: Callable[[int], int], most: int) -> int:
    """Returns the largest n in 0 … most with needed(n) ≤ device; needed must rise."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= device else (low, middle - 1)
    return low


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if check_integer(name, value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _check_format(weights: str, group_size: int | None) -> None:
    if weights not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, got {weights!r}")
    check_group_size(group_size)


def _weight_sizes(
    config: ModelConfig, weights: str, group_size: int | None, lm_head: bool
) -> dict[str, int]:
    """Returns the bytes of every weight by its name."""
    shapes = weight_shapes(config)
    if lm_head and weights != "plain":
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    plain = _plain_bytes(config)
    sizes = {}
    for name, shape in shapes.items():
        quantized = is_block_matrix(name) or (name == HEAD and lm_head)
        if quantized and weights != "plain":
            sizes[name] = _quantized_bytes(shape, weights, group_size)
        else:
            sizes[name] = plain * math.prod(shape)
    return sizes


def _quantized_bytes(shape: tuple[int, ...], weights: str, group_size: int | None) -> int:
    """Returns the bytes of an (N, K) matrix in a format of `pallas_kernels.formats`."""
    n, k = shape[0], padded_inputs(shape[1])
    if weights == "mxfp4":
        return n * (k // 2 + k // MXFP4_GROUP)
    groups = 1 if group_size is None else k // group_size
    return n * ((k // 2 if weights == "int4" else k) + groups * _SCALE_BYTES)


def _plain_bytes(config: ModelConfig) -> int:
    """Returns the bytes per number that is not quantized."""
    return 2 if config.dtype == "bfloat16" else 4
