"""Widens a small model: the same function at the cost of a large shape.

Benchmarks need no trained model of a billion parameters this way; a random one would accept drafts
by accident only. A small trained model fills the corner of a large one:

- Weights that write to the residual stream (o, down) are zero outside the small weights, so the
  added features of the stream stay zero. Weights that read it (q, k, v, gate, up) are random there.
  Added heads, feed-forward features and layers compute something that has no effect.
- A norm's mean is over more features. Its scale (in float32) and epsilon make up for that.
- Query heads stay with their key-value head, and small features come first. Every quantization
  group whose size divides the small model's sizes therefore holds the same numbers as in the small
  model, and a quantized draft makes the same errors.
- Added tokens are never chosen. One added feature of the stream is a constant that is too small to
  move a norm. The last norm magnifies it, and the head's rows for added tokens subtract it.

This measures the bytes and operations of the large shape, and the acceptance of the small model's
text. It does not measure how well a model of this size agrees with its own casts. Casts of larger
models err less (ML-SpecQD accepts more than 90 % of an MXFP4 cast's drafts), so acceptance is
rather underestimated. Most layers do nothing, so skipping only those would be free. A small layer
therefore represents the block of layers that begins with it. Do not use this to find out which
layers a large model can spare.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import Bfloat16Weight, Quantized, plain_weight
from pallas_kernels.weight_values import plain_values
from specjax.model.config import ModelConfig
from specjax.model.layers import LINEARS, Layer, Linear
from specjax.model.params import Params, linear_shapes, prepack

# Llama-3.2-1B with about as many tokens as Llama 2; the small models' vocabulary has 4096.
LARGE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_layers": 16, "num_heads": 32,
    "num_kv_heads": 8, "vocab_size": 32768,
}  # fmt: skip
# A twentieth of LARGE: the shape of Llama-68M, ML-SpecQD's small draft, with one layer more.
DRAFT = LARGE | {
    "hidden_size": 768, "intermediate_size": 3072, "num_layers": 3, "num_heads": 12,
    "num_kv_heads": 4,
}  # fmt: skip

_CONSTANT = 2.0**-20  # its square vanishes in a norm's mean
_NEVER = -(2.0**15)  # in the logit of an added token, over the last norm's root
_WRITING = ("o", "down")


def widen(params: Params, *, seed: int = 0, **sizes: int) -> Params:
    """Returns the same function in a larger shape.

    Args:
      params: an unquantized model without biases and query norms, with tied embeddings.
      seed: seeds the added weights.
      sizes: the fields of `ModelConfig` to enlarge, such as those of `LARGE`; head_dim stays.

    Returns:
      A model of these sizes. Its logits for the small model's tokens are the small model's.

    Raises:
      ValueError: the model is of another kind, or a size does not hold it.
    """
    small = params.config
    wide = dataclasses.replace(small, **sizes)
    wide = dataclasses.replace(
        wide, rms_norm_eps=small.rms_norm_eps * small.hidden_size / wide.hidden_size
    )
    _check(params, wide)
    rng = np.random.default_rng(seed)
    places = dict(zip(first_layers(small, wide), params.layers, strict=True))
    large = Params(
        embedding=_embedding(params, wide, rng),
        layers=tuple(_layer(places.get(i), small, wide, rng) for i in range(wide.num_layers)),
        final_norm=_norm(params.final_norm, wide, added=1 / _CONSTANT),
        lm_head=None,
        config=wide,
    )
    return prepack(large)


def first_layers(small: ModelConfig, wide: ModelConfig) -> tuple[int, ...]:
    """The indices of the small model's layers in the large one."""
    return tuple(i * wide.num_layers // small.num_layers for i in range(small.num_layers))


def _check(params: Params, wide: ModelConfig) -> None:
    small = params.config
    if any(isinstance(linear.weight, Quantized) for linear in params.linears()):
        raise ValueError("params must be unquantized: widen first, then quantize")
    extras = ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "hadamard")
    odd = [name for name in extras if getattr(small, name)]
    if odd or not small.tie_word_embeddings:
        raise ValueError(f"params must be tied and plain, got {', '.join(odd) or 'an own head'}")
    for name in LARGE:
        if getattr(wide, name) < getattr(small, name):
            raise ValueError(f"{name} must be at least the small model's {getattr(small, name)}")
    if wide.head_dim != small.head_dim or wide.hidden_size == small.hidden_size:
        raise ValueError("head_dim must stay and hidden_size grow")
    if wide.num_heads // wide.num_kv_heads < small.num_heads // small.num_kv_heads:
        raise ValueError(
            "num_heads / num_kv_heads must be at least the small model's "
            f"{small.num_heads // small.num_kv_heads}"
        )


def _layer(
    layer: Layer | None, small: ModelConfig, wide: ModelConfig, rng: np.random.Generator
) -> Layer:
    """The large layer around a small one. None gives a layer without effect."""
    queries, stream = _query_rows(small, wide), np.arange(small.hidden_size)
    features = np.arange(small.intermediate_size)
    keys = np.arange(small.num_kv_heads * small.head_dim)
    rows = {"q": queries, "k": keys, "v": keys, "gate": features, "up": features}
    columns = {"o": queries, "down": features}
    weights = {}
    for name, shape in linear_shapes(wide).items():
        fill = np.zeros(shape, np.float32) if name in _WRITING else _random(shape, rng)
        if layer is not None:
            place = np.ix_(rows.get(name, stream), columns.get(name, stream))
            fill[place] = plain_values(getattr(layer, name).weight)
        weights[name] = Linear(_held(fill, wide))
    ones = jnp.ones(small.hidden_size)
    norms = (ones, ones) if layer is None else (layer.attention_norm, layer.mlp_norm)
    assert set(weights) == set(LINEARS)
    return Layer(attention_norm=_norm(norms[0], wide), mlp_norm=_norm(norms[1], wide), **weights)


def _embedding(
    params: Params, wide: ModelConfig, rng: np.random.Generator
) -> jax.Array | Bfloat16Weight:
    """The small rows, then zeros and the constant. Rows of added tokens are random otherwise."""
    values = plain_values(params.embedding)
    v, d = values.shape
    table = _random((wide.vocab_size, wide.hidden_size), rng)
    table[v:, d], table[:v] = _NEVER, 0
    table[:v, :d], table[:v, d] = values, _CONSTANT
    return _held(table, wide)


def _query_rows(small: ModelConfig, wide: ModelConfig) -> np.ndarray:
    """The indices of the small queries' features in the large ones, beside their key-value head."""
    heads = np.arange(wide.num_heads).reshape(wide.num_kv_heads, -1)
    heads = heads[: small.num_kv_heads, : small.num_heads // small.num_kv_heads].reshape(-1, 1)
    return (heads * small.head_dim + np.arange(small.head_dim)).reshape(-1)


def _norm(scale: jax.Array, wide: ModelConfig, added: float = 0.0) -> jax.Array:
    """The scale for more features: mean(x²) is smaller by small / wide. f32[D]."""
    d, width = scale.shape[0], wide.hidden_size
    grown = np.zeros(width, np.float32)
    grown[d] = added
    grown[:d] = np.asarray(scale, np.float32) * np.float32(np.sqrt(d / width))
    return jax.device_put(grown)


def _random(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Random weights. Rows repeat, because their values have no effect."""
    n, k = shape
    rows = min(n, 64)
    block = rng.normal(size=(rows, k)).astype(np.float32) * k**-0.5
    return np.tile(block, (-(-n // rows), 1))[:n]


def _held(values: np.ndarray, config: ModelConfig) -> jax.Array | Bfloat16Weight:
    return plain_weight(jax.device_put(values.astype(config.dtype)))
