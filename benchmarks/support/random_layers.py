"""Layers of random 4-bit weights, for benchmarks of speed and memory that need no text."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import Int4Weight
from specjax.model.config import ModelConfig
from specjax.model.layers import Layer, Linear
from specjax.model.params import linear_shapes


def random_int4(rng: np.random.Generator, n: int, k: int) -> Int4Weight:
    """A weight N × K in groups of 128, under which the size of activations stays about the same."""
    packed = jnp.asarray(rng.integers(0, 256, (n, k // 2), dtype=np.uint8))
    scales = rng.uniform(0.1, 0.3, (n, k // 128)) * k**-0.5
    return Int4Weight(packed, jnp.asarray(scales, jnp.bfloat16), k)


def random_layers(rng: np.random.Generator, config: ModelConfig) -> tuple[Layer, ...]:
    """The layers of a model."""
    ones = jnp.ones(config.hidden_size, jnp.bfloat16)
    return tuple(
        Layer(
            attention_norm=ones,
            mlp_norm=ones,
            **{
                name: Linear(random_int4(rng, *shape))
                for name, shape in linear_shapes(config).items()
            },
        )
        for _ in range(config.num_layers)
    )
