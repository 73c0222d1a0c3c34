"""Quantization of a model's weights: `quantize` and the methods it knows.

What is quantized are the linear layers of the blocks and, on request, the head. Embeddings, norms
and biases stay as they are: they are small or only looked up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from checkpoints_tools.quantize.rtn import round_to_nearest
from pallas_kernels.formats import Quantized, Weight, check_group_size, plain_values
from specjax.config import ModelConfig
from specjax.params import Params
from specjax.weight_names import HEAD, is_block_matrix, named_weights, params_from_weights

METHODS = {"rtn": round_to_nearest}


def quantize(
    params: Params, method: str = "rtn", *, group_size: int | None = 128, lm_head: bool = False
) -> Params:
    """A quantized copy of a model that shares every array it does not change with the original.

    Args:
      params: a model in 16 or 32 bits.
      method: "rtn", round to nearest.
      group_size: inputs per scale: 32, 64, 128 or None (one scale per output).
      lm_head: quantize the output projection too. Where the embedding serves as the head (tied), a
        quantized copy of it becomes the head and `config.tie_word_embeddings` becomes False: the
        look-up of tokens keeps the original embedding.

    Returns:
      The quantized model.

    Raises:
      ValueError: unknown method or group size, or `params` is quantized already.
    """
    config = quantized_config(params.config, lm_head)
    weights = named_weights(params).items()
    quantized = dict(
        quantize_each(weights, params.config, method=method, group_size=group_size, lm_head=lm_head)
    )
    return params_from_weights(config, quantized)


def quantized_config(config: ModelConfig, lm_head: bool) -> ModelConfig:
    """The configuration of the quantized model: a quantized head is never the embedding."""
    return dataclasses.replace(config, tie_word_embeddings=False) if lm_head else config


def quantize_each(
    weights: Iterable[tuple[str, Weight]],
    config: ModelConfig,
    *,
    method: str,
    group_size: int | None,
    lm_head: bool,
) -> Iterator[tuple[str, Weight]]:
    """`quantize` weight by weight, for models that do not fit into memory as they are.

    Args:
      weights: names (`specjax.weight_names`) and weights, in any order.
      config: of the model before quantization.
      method, group_size, lm_head: as for `quantize`.

    Returns:
      An iterator over the names and weights of the model with `quantized_config(config, lm_head)`.

    Raises:
      ValueError: as `quantize`; for the options at once, not when the first weight is asked for.
    """
    check_options(method, group_size)
    return _quantize_each(weights, config.tie_word_embeddings, method, group_size, lm_head)


def check_options(method: str, group_size: int | None) -> None:
    """Raises ValueError unless `method` and `group_size` are known."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    check_group_size(group_size)


def _quantize_each(
    weights: Iterable[tuple[str, Weight]],
    tied: bool,
    method: str,
    group_size: int | None,
    lm_head: bool,
) -> Iterator[tuple[str, Weight]]:
    def compress(name: str, weight: Weight) -> Weight:
        if isinstance(weight, Quantized):
            raise ValueError(f"{name} is quantized already; quantize a model in 16 or 32 bits")
        return METHODS[method](plain_values(weight), group_size)

    for name, weight in weights:
        chosen = is_block_matrix(name) or (lm_head and name == HEAD)
        yield name, compress(name, weight) if chosen else weight
        if lm_head and tied and name == "embedding":
            yield HEAD, compress(name, weight)
