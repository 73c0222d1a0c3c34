"""A name for every weight of a model, such as "layers.0.q.weight".

Code that reads, writes or quantizes a model one weight at a time needs `Params` as a flat mapping.
The names are the attribute paths of `Params`, so the configuration alone is enough to list them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_kernels.weights import Weight
from specjax.model.config import ModelConfig
from specjax.model.layers import LINEARS, Layer, Linear
from specjax.model.params import Params, linear_shapes

HEAD = "lm_head.weight"


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of a model by its name, biases and norms included."""
    outer = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embedding": outer}
    for index in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"layers.{index}.{name}"] = shape
    shapes["final_norm"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = outer
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    biased = {
        "q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.output_bias,
        "gate": config.mlp_bias, "up": config.mlp_bias, "down": config.mlp_bias,
    }  # fmt: skip
    norms = {"attention_norm": config.hidden_size, "mlp_norm": config.hidden_size}
    if config.qk_norm:
        norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {name: (size,) for name, size in norms.items()}
    for name, (n, k) in linear_shapes(config).items():
        shapes[f"{name}.weight"] = (n, k)
        if biased[name]:
            shapes[f"{name}.bias"] = (n,)
    return shapes


def is_block_matrix(name: str) -> bool:
    """Whether `name` is the weight of a block's linear layer. Quantization changes these."""
    return name.startswith("layers.") and name.endswith(".weight")


def named_weights(params: Params) -> dict[str, Weight]:
    """Returns every weight of `params` by its name: the inverse of `params_from_weights`.

    The weights of a `LayerStack` are copies.
    """
    return dict(each_weight(params))


def each_weight(params: Params) -> Iterator[tuple[str, Weight]]:
    """Yields the weights of `named_weights` in the order of `weight_shapes`, layer by layer."""
    yield "embedding", params.embedding
    names = list(_layer_shapes(params.config))
    for index, layer in enumerate(params.layers):
        found = dict(layer_weights(layer, index))
        for name in names:
            yield f"layers.{index}.{name}", found[f"layers.{index}.{name}"]
    yield "final_norm", params.final_norm
    if params.lm_head is not None:
        yield HEAD, params.lm_head.weight


def params_from_weights(config: ModelConfig, weights: Mapping[str, Weight]) -> Params:
    """Builds the model that has these weights.

    Args:
      config: says which weights the model has.
      weights: one entry for each name of `weight_shapes(config)`.

    Returns:
      The same arrays as `Params`.

    Raises:
      ValueError: a weight is missing.
    """
    missing = [name for name in weight_shapes(config) if name not in weights]
    if missing:
        raise ValueError(f"weights lack {missing[0]!r} ({len(missing)} missing in all)")
    found: dict[str, Any] = dict(weights)  # the name decides whether a weight must be an array
    return Params(
        embedding=found["embedding"],
        layers=tuple(layer_from_weights(found, index) for index in range(config.num_layers)),
        final_norm=found["final_norm"],
        lm_head=None if config.tie_word_embeddings else _linear(found, "lm_head"),
        config=config,
    )


def layer_from_weights(found: Mapping[str, Any], index: int) -> Layer:
    """Builds layer `index` from weights under their names in the model."""
    values: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(Layer)):
        path = f"layers.{index}.{name}"
        values[name] = _linear(found, path) if name in LINEARS else found.get(path)
    return Layer(**values)


def layer_weights(layer: Layer, index: int) -> Iterator[tuple[str, Weight]]:
    """Yields every weight of a layer with its name in the model: the inverse of
    `layer_from_weights`."""
    for field in dataclasses.fields(Layer):
        path, value = f"layers.{index}.{field.name}", getattr(layer, field.name)
        if field.name not in LINEARS:
            if value is not None:
                yield path, value
            continue
        yield f"{path}.weight", value.weight
        if value.bias is not None:
            yield f"{path}.bias", value.bias


def _linear(found: Mapping[str, Any], prefix: str) -> Linear:
    return Linear(found[f"{prefix}.weight"], found.get(f"{prefix}.bias"))
