"""Statistics of the inputs of a model's linear layers, measured on calibration text.

The model runs one layer at a time, with the hidden states of all sequences, [S, T, D], kept between
layers. `observe` runs the original layer and collects the statistics of every linear layer's input.
Once the layer is quantized, `advance` takes the hidden states through it, so that the next layer
sees the inputs that it will have in the quantized model. Activations are in 16 bits throughout.

Second moments suffice for every method here, since the output error of a changed weight is
E[|(W - Q) x|²] = tr((W - Q) E[x xᵀ] (W - Q)ᵀ). So only the hidden states grow with the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32
from numpy.typing import ArrayLike

from pallas_kernels.weights import Weight, is_format
from specjax.model import parallel
from specjax.model.config import ModelConfig
from specjax.model.kv_cache import KVCache
from specjax.model.layers import Layer
from specjax.model.params import held, linear_shapes
from specjax.model.transformer import LinearInputs, block, norm, pass_context

# The linear layers that read each of `LinearInputs`.
READERS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputStatistics:
    """Statistics of a linear layer's input x over all tokens.

    second_moment: f32[K, K], the mean of x xᵀ.
    magnitude: f32[K], the mean of |x|.
    """

    second_moment: jax.Array
    magnitude: jax.Array

    def take(self, order: Int32[Array, " K"]) -> InputStatistics:
        """The statistics of x[order]."""
        return InputStatistics(self.second_moment[order][:, order], self.magnitude[order])

    def divided(self, scales: Float32[Array, " K"]) -> InputStatistics:
        """The statistics of x / scales. scales: f32[K], positive."""
        return InputStatistics(
            self.second_moment / (scales[:, None] * scales), self.magnitude / scales
        )


LayerStatistics = dict[str, InputStatistics]  # by the names of `LINEARS`


def check_tokens(tokens: ArrayLike, config: ModelConfig) -> Int32[np.ndarray, "S T"]:
    """`tokens` as int32[S, T]. Raises ValueError if they do not suit the model."""
    array = np.asarray(tokens)
    if array.ndim != 2 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            "calibration must be integers [S, T], S sequences of T tokens each, "
            f"got {array.dtype.name}{list(array.shape)}"
        )
    if array.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"calibration has sequences of {array.shape[1]} tokens, "
            f"the model has {config.max_position_embeddings} positions"
        )
    if array.min() < 0 or array.max() >= config.vocab_size:
        outside = array[(array < 0) | (array >= config.vocab_size)][0]
        raise ValueError(
            f"calibration holds the token {outside}; the vocabulary has {config.vocab_size} tokens"
        )
    return array.astype(np.int32)


@runtime_checkable
class Encoder(Protocol):
    """Turns text into token ids, as tokenizers do."""

    def encode(self, text: str) -> Sequence[int]: ...


def calibration_tokens(
    text: str, tokenizer: Encoder, *, sequences: int = 16, length: int = 512
) -> Int32[np.ndarray, "{sequences} {length}"]:
    """Takes calibration sequences from a text, evenly spaced and the same every time.

    Args:
      text: the calibration text.
      tokenizer: the model's. If it puts a token before every text, every sequence begins with it.
      sequences: the number of sequences, at least 1; they overlap if the text is short.
      length: tokens in each sequence, at least 1.

    Returns:
      int32[sequences, length].

    Raises:
      ValueError: the text is shorter than one sequence, or a number is less than 1.
    """
    for name, value in (("sequences", sequences), ("length", length)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    first = np.asarray(tokenizer.encode(""), np.int32)
    ids = np.asarray(tokenizer.encode(text), np.int32)[len(first) :]
    size = length - len(first)
    if len(ids) < size:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens, one sequence needs {size}; "
            "give a longer text or a smaller length"
        )
    starts = np.linspace(0, len(ids) - size, sequences).astype(int)
    return np.stack([np.concatenate((first, ids[i : i + size])) for i in starts])


def embed(
    embedding: Weight, tokens: Int[np.ndarray, "S T"], config: ModelConfig
) -> Float[Array, "S T D"]:
    """The hidden states at the first layer's entrance: [S, T, D] in the model's dtype."""
    return parallel.embed(held(embedding, config.dtype), jnp.asarray(tokens), config)


def observe(
    layer: Layer,
    hidden: Float[Array, "S T D"],
    index: int,
    config: ModelConfig,
    step: Callable[[], None],
) -> LayerStatistics:
    """The statistics of the inputs of a block's linear layers.

    Args:
      layer: the block, not quantized.
      hidden: [S, T, D], the hidden states at its entrance.
      index: its number.
      config: the model's.
      step: a function to call after each sequence.

    Returns:
      The statistics by the linear layers' names.
    """
    layer, shapes = hold(layer, config), linear_shapes(config)
    sums = {inputs: _zeros(shapes[names[0]][1]) for inputs, names in READERS.items()}
    for sequence in hidden:
        sums = _add_layer(sums, layer, sequence[None], _alike(index, config), config)
        jax.block_until_ready(sums)
        step()
    means = {inputs: _mean(sums[inputs], hidden) for inputs in READERS}
    return {name: means[inputs] for inputs, names in READERS.items() for name in names}


def advance(
    layer: Layer,
    hidden: Float[Array, "S T D"],
    index: int,
    config: ModelConfig,
    step: Callable[[], None],
) -> Float[Array, "S T D"]:
    """The hidden states at the layer's exit. Arguments as for `observe`; weights in any format."""
    layer, left = hold(layer, config), []
    for sequence in hidden:
        left.append(_run(layer, sequence[None], _alike(index, config), config)[0][0])
        left[-1].block_until_ready()
        step()
    return jnp.stack(left)


def observe_head(
    final_norm: Float[Array, " D"], hidden: Float[Array, "S T D"], config: ModelConfig
) -> InputStatistics:
    """The statistics of the head's input. hidden: [S, T, D], at the last layer's exit."""
    scale, sums = final_norm.astype(config.dtype), _zeros(config.hidden_size)
    for sequence in hidden:
        sums = _add(sums, norm(sequence, scale, config, sequence.dtype))
    return _mean(sums, hidden)


def hold(layer: Layer, config: ModelConfig) -> Layer:
    """The layer with its unquantized weights in the model's dtype."""
    rounded: Layer = jax.tree.map(
        lambda weight: held(weight, config.dtype), layer, is_leaf=is_format
    )
    return rounded


def _alike(index: int, config: ModelConfig) -> int:
    """The first layer of the same computation, so that equal layers share one compiled program."""
    windows = [config.window(i) for i in range(config.num_layers)]
    return windows.index(windows[index])


@partial(jax.jit, static_argnames=("index", "config"))
def _run(
    layer: Layer, x: jax.Array, index: int, config: ModelConfig
) -> tuple[jax.Array, LinearInputs]:
    """Runs a layer over whole sequences with an empty cache. x: [B, T, D]."""
    b, t, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))
    cache = KVCache.create(config, b, t)
    y, _, inputs = block(layer, index, x, cache, pass_context(config, positions))
    return y, inputs


def _zeros(k: int) -> InputStatistics:
    return InputStatistics(jnp.zeros((k, k)), jnp.zeros(k))


# The sums are donated, so they are updated in place: copies of second moments take gigabytes.
@partial(jax.jit, static_argnames=("index", "config"), donate_argnames="sums")
def _add_layer(
    sums: dict[str, InputStatistics], layer: Layer, x: jax.Array, index: int, config: ModelConfig
) -> dict[str, InputStatistics]:
    """Adds a pass over x, [B, T, D], to the sums, which have the names of `LinearInputs`."""
    _, inputs = _run(layer, x, index, config)
    return {name: _add(sums[name], getattr(inputs, name)) for name in sums}


@partial(jax.jit, donate_argnames="sums")
def _add(sums: InputStatistics, inputs: jax.Array) -> InputStatistics:
    """Adds inputs [..., K] to the sums."""
    x = inputs.astype(jnp.float32).reshape(-1, inputs.shape[-1])
    products = lax.dot_general(x, x, (((0,), (0,)), ((), ())), precision="highest")
    return InputStatistics(
        sums.second_moment + products, sums.magnitude + jnp.sum(jnp.abs(x), axis=0)
    )


def _mean(sums: InputStatistics, hidden: jax.Array) -> InputStatistics:
    count = hidden.shape[0] * hidden.shape[1]
    mean: InputStatistics = jax.tree.map(lambda each: each / count, sums)
    return mean
