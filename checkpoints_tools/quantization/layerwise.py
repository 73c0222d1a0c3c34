"""Quantizes a model layer by layer: named weights come in and go out one layer at a time.

Each layer is transformed and rounded before the next is read, so the original model need not fit
into memory. If the method needs calibration, the hidden states of the calibration text are kept at
the entrance of the current layer (`calibration`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_tools.quantization import quarot
from checkpoints_tools.quantization.atom import sort_hidden
from checkpoints_tools.quantization.awq import scale_layer
from checkpoints_tools.quantization.calibration import (
    LayerStatistics,
    advance,
    embed,
    hold,
    observe,
    observe_head,
)
from checkpoints_tools.quantization.exact import in_12_bits
from checkpoints_tools.quantization.recipe import GPTQ, Recipe
from pallas_kernels.weight_values import dequantize, plain_values
from pallas_kernels.weights import Rounded, Weight
from specjax.model.config import ModelConfig
from specjax.model.layers import LINEARS, Layer, Linear
from specjax.model.weight_names import HEAD, layer_from_weights, layer_weights

SEED = 0  # for QuaRot's random signs


class Watcher:
    """Observes a run. This base class starts at the first layer and ignores every report."""

    def step(self, what: str) -> None:
        """Called when a step of the work is done."""

    def restore(self) -> tuple[list[Layer], jax.Array | None]:
        """The layers that an earlier run finished, starting with the first, and the hidden states
        at the exit of the last one (None without calibration)."""
        return [], None

    def keep(self, index: int, layer: Layer, hidden: jax.Array | None) -> None:
        """Called when a layer is finished, with the hidden states at its exit."""


def quantize_layers(
    weights: Iterable[tuple[str, Weight]],
    config: ModelConfig,
    recipe: Recipe,
    *,
    lm_head: bool = False,
    tokens: np.ndarray | None = None,
    watcher: Watcher | None = None,
    requantize: bool = False,
) -> Iterator[tuple[str, Weight]]:
    """Quantizes a model weight by weight.

    Args:
      weights: names and weights in the order of `specjax.model.weight_names.weight_shapes`.
      config: the model's, before quantization.
      recipe: the method.
      lm_head: quantize the output projection too.
      tokens: int32[S, T], the calibration text; None for a method that does not need it.
      watcher: observes the run.
      requantize: whether matrices that are quantized already are rounded a second time.

    Returns:
      An iterator over the names and weights of the model with `quantized_config(...)`.

    Raises:
      ValueError: a weight is quantized already and `requantize` is False, or the model is rotated
        already.
    """
    watcher = Watcher() if watcher is None else watcher
    plain = _requantized if requantize else _plain
    parts: Iterator[dict[str, Weight]] = (
        dict(group) for _, group in itertools.groupby(weights, key=_part)
    )
    signs = quarot.random_signs(config, SEED) if recipe.has("quarot") else None
    tied, config = config.tie_word_embeddings, quantized_config(config, recipe, lm_head)
    embedding = next(parts)["embedding"]
    # The embedding is large: it is kept only if the head is made from it.
    head = embedding if tied and not config.tie_word_embeddings else None
    if signs is not None:
        embedding = quarot.rotate_rows(plain("embedding", embedding), signs)
    yield "embedding", _embedding(embedding, recipe, tied)
    finished, hidden = watcher.restore()
    if tokens is not None and hidden is None:
        hidden = embed(embedding, tokens, config)
    del embedding
    for index, found in zip(range(config.num_layers), parts, strict=False):
        if index < len(finished):
            layer = finished[index]
        else:
            values = {name: plain(name, weight) for name, weight in found.items()}
            layer = _quantize_layer(found, values, index, hidden, signs, recipe, config, watcher)
            if hidden is not None:
                step = partial(watcher.step, f"layer {index}: forward")
                hidden = advance(layer, hidden, index, config, step)
            watcher.keep(index, layer, hidden)
        yield from layer_weights(layer, index)
    final_norm = next(parts)["final_norm"]
    assert isinstance(final_norm, jax.Array)
    yield "final_norm", final_norm if signs is None else jnp.ones_like(final_norm)
    if not tied:
        head = next(parts)[HEAD]
    if head is None:
        return
    if signs is not None:
        head = quarot.rotate_rows(plain(HEAD, head), final_norm.astype(jnp.float32) * signs)
        final_norm = jnp.ones_like(final_norm)
    if lm_head or recipe.exact is not None:
        read = None if hidden is None else observe_head(final_norm, hidden, config)
        head = recipe.round("lm_head", plain(HEAD, head), read)
    yield HEAD, head


def quantized_config(config: ModelConfig, recipe: Recipe, lm_head: bool) -> ModelConfig:
    """The configuration of the quantized model. A quantized head is not tied to the embedding.

    A method that keeps the model exactly has every matrix in its format, so a tied head stays tied.
    Raises ValueError if the recipe rotates a model that is rotated already, or keeps bfloat16 where
    the model has another dtype.
    """
    if recipe.exact is not None:
        if config.dtype != "bfloat16":
            raise ValueError(
                f"method {recipe.method!r} keeps bfloat16 matrices, and the model's dtype is "
                f"{config.dtype}; specjax.dequantize(params, 'bfloat16') rounds it"
            )
        return config
    if recipe.has("quarot"):
        config = quarot.rotated_config(config)
    return dataclasses.replace(config, tie_word_embeddings=False) if lm_head else config


def _embedding(weight: Weight, recipe: Recipe, tied: bool) -> Weight:
    """The embedding as the quantized model holds it: changed by exact methods alone.

    One that is tied drafts as the head; its draft plane is rounded without data.
    """
    if recipe.exact is None:
        return weight
    values = _requantized("embedding", weight)
    if recipe.exact == "nested16" and tied:
        if recipe.rounding in GPTQ:
            recipe = dataclasses.replace(recipe, method="nested16")
        return recipe.round("embedding", values)
    return in_12_bits("embedding", values)


def _part(item: tuple[str, Weight]) -> list[str]:
    """The part of the model that a weight belongs to, a layer or something outside the layers."""
    return item[0].split(".")[:2]


def _quantize_layer(
    found: dict[str, Weight],
    values: dict[str, jax.Array],
    index: int,
    hidden: jax.Array | None,
    signs: jax.Array | None,
    recipe: Recipe,
    config: ModelConfig,
    watcher: Watcher,
) -> Layer:
    layer, kept = layer_from_weights(values, index), layer_from_weights(found, index)
    statistics: LayerStatistics | None = None
    if recipe.transforms:
        layer = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layer)
    if signs is not None:
        layer = quarot.rotate_layer(layer, signs, config)
    if hidden is not None:
        step = partial(watcher.step, f"layer {index}: statistics")
        statistics = observe(layer, hidden, index, config, step)
    if recipe.has("awq"):
        assert statistics is not None
        layer, statistics = scale_layer(layer, statistics, recipe.round_plainly, config)
        watcher.step(f"layer {index}: scales")
    if recipe.has("atom") and not config.hadamard:  # that rotation mixes the hidden features
        assert statistics is not None
        layer, statistics = sort_hidden(layer, statistics)
    if recipe.transforms:
        kept = hold(layer, config)
    rounded: dict[str, Any] = {}
    for name in LINEARS:
        read = None if statistics is None else statistics[name]
        weight = recipe.round(name, getattr(layer, name).weight, read)
        rounded[name] = Linear(weight, getattr(kept, name).bias)
        watcher.step(f"layer {index}: {name}")
    return dataclasses.replace(kept, **rounded)


def _plain(name: str, weight: Weight) -> jax.Array:
    if isinstance(weight, Rounded):
        raise ValueError(
            f"{name} is quantized already; quantize a model in 16 or 32 bits, "
            "which specjax.dequantize(params) makes"
        )
    return plain_values(weight)


def _requantized(name: str, weight: Weight) -> jax.Array:
    return dequantize(weight) if isinstance(weight, Rounded) else plain_values(weight)
