"""QuaRot (Ashkboos et al. 2024, section 4) spreads outliers by rotations.

The rotations do not change the model's function. Let H be a Hadamard matrix divided by the square
root of its size, and Q = H · diag(random signs):

    R1   the residual stream carries Q · x. Weights that write the stream apply Q (the embedding,
         o, down); weights that read it undo Q (q, k, v, gate, up, the head).
    R2   H rotates every head of v's output, and also rotates o's input across the heads, online
         (`ModelConfig.hadamard`). The weights of o undo both.
    R4   H rotates down's input, online.

    R3   H rotates queries and keys after RoPE, online, if the cache is quantized. It changes no
         weight.

A norm commutes with a rotation once its scale is folded into the layers that read it. The authors
also subtract each embedding's mean. This is left out, because it changes the function of a model
with RMS norms.

`pallas_kernels.hadamard` rotates vectors and, since x · w = (H · x) · (H · w), the rows of weights.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.formats import Bfloat16Weight, plain_weight
from pallas_kernels.hadamard import hadamard
from pallas_kernels.rounding import round_to
from pallas_kernels.weight_values import plain_values
from pallas_kernels.weights import Rounded, Weight
from specjax.model.config import ModelConfig
from specjax.model.layers import Layer, Linear

ROWS = 8192  # rows of the embedding and the head to rotate at once, to limit memory


def rotated_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the rotated model. A tied embedding becomes two matrices.

    Raises ValueError if the model is rotated already.
    """
    if config.hadamard:
        raise ValueError("the model is rotated already; leave quarot out of the method")
    return dataclasses.replace(config, hadamard=True, tie_word_embeddings=False)


def random_signs(config: ModelConfig, seed: int) -> Float32[Array, " D"]:
    """The random part of R1: f32[D] of ±1."""
    coins = jax.random.bernoulli(jax.random.key(seed), shape=(config.hidden_size,))
    return jnp.where(coins, 1.0, -1.0)


@functools.partial(jax.jit, static_argnames="config")
def rotate_layer(layer: Layer, signs: Float32[Array, " D"], config: ModelConfig) -> Layer:
    """Rotates one block of a model.

    Args:
      layer: the block, with float32 weights.
      signs: the model's `random_signs`.
      config: the model's.

    Returns:
      The rotated block. Its norm scales are ones.
    """

    def reader(linear: Linear, norm_scale: jax.Array) -> Linear:  # undoes R1
        return Linear(hadamard(_values(linear) * (norm_scale * signs)), linear.bias)

    def writer(linear: Linear, weight: jax.Array) -> Linear:  # does R1
        bias = None if linear.bias is None else hadamard(linear.bias * signs)
        return Linear(hadamard(weight * signs[:, None], axis=0), bias)

    def value_heads(outputs: jax.Array) -> jax.Array:  # R2 of v's outputs: [N, ...]
        by_head = outputs.reshape(-1, config.head_dim, *outputs.shape[1:])
        return jnp.reshape(hadamard(by_head, axis=1), outputs.shape)

    o = _values(layer.o).reshape(-1, config.num_heads, config.head_dim)
    return dataclasses.replace(
        layer,
        attention_norm=jnp.ones_like(layer.attention_norm),
        q=reader(layer.q, layer.attention_norm),
        k=reader(layer.k, layer.attention_norm),
        v=jax.tree.map(value_heads, reader(layer.v, layer.attention_norm)),
        o=writer(layer.o, hadamard(hadamard(o, axis=1), axis=2).reshape(layer.o.weight.shape)),
        mlp_norm=jnp.ones_like(layer.mlp_norm),
        gate=reader(layer.gate, layer.mlp_norm),
        up=reader(layer.up, layer.mlp_norm),
        down=writer(layer.down, hadamard(_values(layer.down))),
    )


def rotate_rows(
    weight: Weight, scale: Float32[Array, " D"]
) -> Float[Array, "V D"] | Bfloat16Weight:
    """Scales the columns of a matrix (V, D) and applies R1, ROWS rows at a time."""
    assert not isinstance(weight, Rounded)
    values = plain_values(weight)
    parts = [_rotate_chunk(values[i : i + ROWS], scale) for i in range(0, len(values), ROWS)]
    return plain_weight(jnp.concatenate(parts))


@jax.jit
def _rotate_chunk(values: jax.Array, scale: jax.Array) -> jax.Array:
    return round_to(hadamard(values.astype(jnp.float32) * scale), values.dtype)


def _values(linear: Linear) -> jax.Array:
    """f32[N, K]."""
    assert isinstance(linear.weight, jax.Array)
    return linear.weight
