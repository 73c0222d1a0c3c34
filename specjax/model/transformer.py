"""The model: one pure `forward` for every supported family.

Llama 2, 3, 3.1 and 3.2, CodeLlama, Mistral, Qwen2, Qwen2.5 and Qwen3 differ only in what their
`ModelConfig` says and in which weights are there (biases, query and key norms).

Numerics: matrix products, norms, RoPE, softmax and logits are float32; what flows between them is
rounded to `config.dtype` (`pallas_kernels.rounding`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.activations import Activation
from pallas_kernels.attention import attention
from pallas_kernels.formats import Quantized
from pallas_kernels.hadamard import hadamard
from pallas_kernels.matmul import matmul
from pallas_kernels.norms import rms_norm
from pallas_kernels.rope import rotate
from pallas_kernels.rounding import round_to
from specjax.model.config import ModelConfig, RopeScaling
from specjax.model.kv_cache import KVCache
from specjax.model.parallel import embed, gather, own_part
from specjax.model.params import Layer, Linear, Params


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    ancestors: jax.Array | None = None,
    activation: Activation = "a16",
    layers: tuple[int, ...] | None = None,
) -> tuple[jax.Array, KVCache]:
    """One pass over T new tokens per row.

    The tokens' keys and values are written to the cache's slots lengths … lengths + T - 1, over
    whatever a draft left there; `cache.lengths` is returned as it came, because what of this is
    kept is the caller's decision.

    Args:
      params: weights.
      tokens: int32[B, T].
      positions: int32[B, T], for RoPE and sliding windows: cache.lengths + a token's depth, which
        is 0 … T - 1 in a chain.
      cache: the context.
      ancestors: int32[B, T, D], of a tree: the new tokens that each one continues, itself last; as
        `trees.ancestors` gives them. None: a chain.
      activation: activation precision of the quantized layers: "a16", "a8" or "a4".
      layers: the layers to run, in order; None for all.

    Returns:
      logits: f32[B, T, V], and the cache with the new entries.
    """
    config = params.config
    rope = rope_angles(config, positions)
    x = embed(params.embedding, tokens, config.vocab_size)
    for index in range(config.num_layers) if layers is None else layers:
        x, cache, _ = block(
            params.layers[index], x, index, rope, positions, cache, ancestors, activation, config
        )
    x = norm(x, params.final_norm, config, x.dtype)
    return gather(linear(x, params.head, activation), config.vocab_size), cache


def prefill(
    params: Params,
    tokens: jax.Array,
    cache: KVCache,
    activation: Activation = "a16",
    layers: tuple[int, ...] | None = None,
) -> KVCache:
    """The cache with the entries of a row's first tokens. int32[B, T], T = 0 allowed."""
    if tokens.shape[1] == 0:
        return cache
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(params, tokens, positions, cache, activation=activation, layers=layers)[1]


class LinearInputs(NamedTuple):
    """What the linear layers of a block read: [B, T, K] each. Calibration looks at it."""

    qkv: jax.Array
    o: jax.Array
    gate_up: jax.Array
    down: jax.Array


def block(
    layer: Layer,
    x: jax.Array,
    index: int,
    rope: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: KVCache,
    ancestors: jax.Array | None,
    activation: Activation,
    config: ModelConfig,
) -> tuple[jax.Array, KVCache, LinearInputs]:
    """One layer of `forward`, number `index`, with the residual stream x: [B, T, D] around it."""
    attended, cache, qkv, o = _attention_block(
        layer, x, index, rope, positions, cache, ancestors, activation, config
    )
    x = _add(x, attended)
    hidden, gate_up, down = _mlp_block(layer, x, activation, config)
    return _add(x, hidden), cache, LinearInputs(qkv, o, gate_up, down)


def linear(x: jax.Array, layer: Linear, activation: Activation) -> jax.Array:
    """x: [..., K] -> f32[..., N]."""
    return linears(x, (layer,), activation)[0]


def linears(
    x: jax.Array, layers: tuple[Linear, ...], activation: Activation
) -> tuple[jax.Array, ...]:
    """Layers that read the same x: [..., K] -> f32[..., N] each.

    Those that are not quantized take x in 16 bits whatever `activation` says.
    """
    weights = tuple(layer.weight for layer in layers)
    if len({isinstance(weight, Quantized) for weight in weights}) == 2:
        return tuple(linear(x, layer, activation) for layer in layers)
    quantized = isinstance(weights[0], Quantized)
    products = matmul(x, weights, activation if quantized else "a16")
    return tuple(
        y if layer.bias is None else y + layer.bias.astype(jnp.float32)
        for y, layer in zip(products, layers, strict=True)
    )


def norm(x: jax.Array, scale: jax.Array, config: ModelConfig, dtype: jnp.dtype) -> jax.Array:
    """Root-mean-square norm over the last axis, rounded to `dtype`."""
    return rms_norm(x, scale, config.rms_norm_eps, dtype)


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    """The residual stream: x in its own dtype plus y: f32, whole or a device's part."""
    part = own_part(x, y.shape[-1])
    return gather(round_to(part.astype(jnp.float32) + y, x.dtype), x.shape[-1])


def _attention_block(
    layer: Layer,
    x: jax.Array,
    index: int,
    rope: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: KVCache,
    ancestors: jax.Array | None,
    activation: Activation,
    config: ModelConfig,
) -> tuple[jax.Array, KVCache, jax.Array, jax.Array]:
    """x: [B, T, D] -> f32[B, T, D], the cache with the new entries, and what q and o read.

    Under a mesh q, k, v, attention and what is returned first are the device's part.
    """
    b, t, _ = x.shape
    normed = norm(x, layer.attention_norm, config, x.dtype)

    q, k, v = (
        y.reshape(b, t, -1, config.head_dim)
        for y in linears(normed, (layer.q, layer.k, layer.v), activation)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q = norm(q, layer.q_norm, config, jnp.float32)
        k = norm(k, layer.k_norm, config, jnp.float32)
    if config.hadamard and cache.bits < 16:  # their product stays; keys lose less when rounded
        q, k = (round_to(hadamard(rotate(y, *rope, jnp.float32)), x.dtype) for y in (q, k))
    else:
        q, k = rotate(q, *rope, x.dtype), rotate(k, *rope, x.dtype)
    cache = cache.write(index, k, round_to(v, x.dtype))
    mixed = attention(
        q, cache.keys[index], cache.values[index], cache.lengths, positions, ancestors,
        window=config.window(index), head_scale=config.head_dim**-0.5,
    )  # fmt: skip
    if config.hadamard:
        mixed = hadamard(gather(mixed, config.num_heads, axis=-2), axis=-2)
    mixed = round_to(mixed.reshape(b, t, -1), x.dtype)
    mixed = gather(mixed, config.num_heads * config.head_dim)
    return linear(mixed, layer.o, activation), cache, normed, mixed


def _mlp_block(
    layer: Layer, x: jax.Array, activation: Activation, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """SwiGLU. x: [B, T, D] -> f32[B, T, D], and what gate and down read."""
    normed = norm(x, layer.mlp_norm, config, x.dtype)
    gate, up = linears(normed, (layer.gate, layer.up), activation)
    hidden = jax.nn.silu(gate) * up
    if config.hadamard:
        hidden = hadamard(gather(hidden, config.intermediate_size))
    hidden = gather(round_to(hidden, x.dtype), config.intermediate_size)
    return linear(hidden, layer.down, activation), normed, hidden


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles: f32[B, T, E/2] each."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope_frequencies(config))
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_scale
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of every pair of a head's dimensions: f32[E/2]."""
    # In float32 like Hugging Face: the rounding of a frequency grows with the position, and models
    # are made with these.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = 1 / np.float32(config.rope_theta) ** exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    kept = _unscaled_share(config, scaling, frequencies)
    return (frequencies * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def _unscaled_share(
    config: ModelConfig, scaling: RopeScaling, frequencies: np.ndarray
) -> np.ndarray:
    """How much of each frequency is left as it is (1) rather than divided by the factor (0)."""
    context = scaling.original_max_position_embeddings
    if scaling.kind == "linear":
        return np.zeros_like(frequencies)
    if scaling.kind == "llama3":
        turns = context * frequencies / (2 * math.pi)  # full rotations within the old context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return np.clip((turns - low) / (high - low), 0, 1)

    def dimension(turns: float) -> float:  # index of the pair that makes so many rotations
        radians = context / (turns * 2 * math.pi)
        return config.head_dim * math.log(radians) / (2 * math.log(config.rope_theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    pairs = np.arange(len(frequencies), dtype=np.float64)
    return 1 - np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
