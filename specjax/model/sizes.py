"""The bytes of weights, KV caches and a pass's intermediates, counted without making any.

They count what this library really holds: scales, padding, and weights that stay in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pallas_kernels.arrays import TILE
from pallas_kernels.attention import BLOCK
from pallas_kernels.bfloat12 import BLOCK_INPUTS, PALETTE, PALETTE_INPUTS
from pallas_kernels.cache_entries import check_cache_bits
from pallas_kernels.formats import MXFP4_GROUP, check_group_size, padded_inputs
from specjax.checks import check_integer
from specjax.model.config import ModelConfig
from specjax.model.weight_names import HEAD, is_block_matrix, weight_shapes

FORMATS = ("plain", "int4", "int8", "mxfp4", "nested8", "bfloat12", "nested16")
_EXACT = ("bfloat12", "nested16")  # formats of all matrices
_SCALE_BYTES = 2  # bfloat16
_ENTRY_BYTES = 5  # a float32 scale and an 8-bit zero per quantized entry


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
          (rtn, gptq …), "int8", "nested8" or "mxfp4". Embeddings, norms and biases are plain
          always. With "bfloat12" and "nested16" (whose draft plane is "int4") embeddings have that
          format too; their few escapes, which only the weights tell, are not counted.
      group_size: inputs per scale of "int4", "int8" and "nested8".
      lm_head: whether the head has that format too.

    Returns:
      Bytes.

    Raises:
      ValueError: an unknown format or group size.
    """
    check_format(weights, group_size)
    return sum(weight_sizes(config, weights, group_size, lm_head).values())


def weight_sizes(
    config: ModelConfig, weights: str, group_size: int | None, lm_head: bool
) -> dict[str, int]:
    """Returns the bytes of every weight by its name."""
    shapes = weight_shapes(config)
    exact = weights in _EXACT
    if lm_head and weights != "plain" and not exact:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    plain = _plain_bytes(config)
    sizes = {}
    for name, shape in shapes.items():
        drafts = is_block_matrix(name) or name == HEAD or config.tie_word_embeddings
        quantized = is_block_matrix(name) or (name == HEAD and lm_head)
        if exact and len(shape) == 2:
            sizes[name] = _bytes_in_12_bits(shape)
            if weights == "nested16" and drafts:
                sizes[name] += _quantized_bytes(shape, "int4", group_size)
        elif quantized and weights != "plain":
            sizes[name] = _quantized_bytes(shape, weights, group_size)
        else:
            sizes[name] = plain * math.prod(shape)
    return sizes


def cache_bytes(config: ModelConfig, rows: int, slots: int, bits: int = 16) -> int:
    """Bytes of a KV cache: 2 · layers · heads · head_dim · slots · rows · bytes per entry.

    Slots come in whole blocks; entries of 8 or 4 bits have a scale and a zero per slot and head.
    Raises ValueError where an argument is out of its range.
    """
    check_cache_bits(bits)
    check_counts(rows=rows, slots=slots)
    vectors = 2 * config.num_layers * rows * (-(-slots // BLOCK) * BLOCK) * config.num_kv_heads
    if bits == 16:
        return vectors * config.head_dim * _plain_bytes(config)
    return vectors * (config.head_dim * bits // 8 + _ENTRY_BYTES)


def activation_bytes(config: ModelConfig, rows: int, tokens: int, *, logits: bool = True) -> int:
    """Estimates the bytes of the intermediates of one pass over `tokens` tokens per row.

    The largest moment counts: a block's residual stream with the float32 products of its attention
    or its feed-forward, or the float32 logits after the last block, which a pass over a prompt does
    not compute.
    """
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    inside = 8 * config.hidden_size + 4 * max(2 * heads, 3 * config.intermediate_size)
    outside = 4 * (config.vocab_size + config.hidden_size) if logits else 0
    return rows * tokens * max(inside, outside)


def in_units(count: int) -> str:
    """A number of bytes as text, in the largest unit that it has at least one of."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} bytes"


def most_that_fits(device: int, needed: Callable[[int], int], most: int) -> int:
    """Returns the largest n in 0 … most with needed(n) ≤ device; needed must rise."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= device else (low, middle - 1)
    return low


def check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if check_integer(name, value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_format(weights: str, group_size: int | None) -> None:
    if weights not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, got {weights!r}")
    check_group_size(group_size)


def _quantized_bytes(shape: tuple[int, ...], weights: str, group_size: int | None) -> int:
    """Returns the bytes of an (N, K) matrix in a format of `pallas_kernels.formats`."""
    n, k = shape[0], padded_inputs(shape[1])
    if weights == "mxfp4":
        return n * (k // 2 + k // MXFP4_GROUP)
    groups = 1 if group_size is None else k // group_size
    return n * ((k // 2 if weights == "int4" else k) + groups * _SCALE_BYTES)


def _bytes_in_12_bits(shape: tuple[int, ...]) -> int:
    """Returns the bytes of an (N, K) matrix as `pallas_kernels.bfloat12` holds it."""
    n, k = shape
    blocks, palettes = -(-k // BLOCK_INPUTS), -(-k // PALETTE_INPUTS)
    return -(-n // TILE) * (TILE * 3 * 4 * blocks + PALETTE * palettes)


def _plain_bytes(config: ModelConfig) -> int:
    """Returns the bytes per number that is not quantized."""
    return 2 if config.dtype == "bfloat16" else 4
