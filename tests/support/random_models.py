"""Small random models whose greedy output does not loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_tools.quantization import quantize
from pallas_kernels.formats import plain_weight
from specjax.model.config import ModelConfig
from specjax.model.layers import Layer, Linear
from specjax.model.params import Params, linear_shapes
from tests.support.random_weights import rounded

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=172, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=24, max_position_embeddings=512, dtype="float32",
)  # fmt: skip


def random_model(config: ModelConfig = CONFIG, seed: int = 0) -> Params:
    """Unquantized random weights, in the configuration's dtype, with an untied head."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(config.dtype)

    def normal(*shape: int, scale: float) -> jax.Array:
        return rounded(rng.normal(size=shape) * scale, dtype)

    def layer() -> Layer:
        linears = {
            name: Linear(plain_weight(normal(n, k, scale=1.5 * k**-0.5)))
            for name, (n, k) in linear_shapes(config).items()
        }
        norms = [rounded(rng.uniform(0.5, 1.5, config.hidden_size), dtype) for _ in range(2)]
        return Layer(attention_norm=norms[0], mlp_norm=norms[1], **linears)

    shape = (config.vocab_size, config.hidden_size)
    return Params(
        embedding=plain_weight(normal(*shape, scale=1.0)),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=rounded(np.ones(config.hidden_size), dtype),
        lm_head=Linear(plain_weight(normal(*shape, scale=0.3))),
        config=config,
    )


def quantized_model(config: ModelConfig = CONFIG, seed: int = 0, **options: object) -> Params:
    """`random_model` in 4 bits."""
    return quantize(random_model(config, seed), "rtn", **options)


def random_prompts(lengths: tuple[int, ...], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """One prompt of random tokens per length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
