"""The angles of rotary position embeddings, with the scalings that models are trained with.

"linear" divides every frequency. "llama3" and "yarn" divide the slow ones alone: a pair of
dimensions that turns many times within the original context keeps its frequency.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from specjax.model.config import ModelConfig, RopeScaling


def rope_angles(
    config: ModelConfig, positions: Int32[Array, "B T"]
) -> tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]:
    """Returns the cosines and sines of every position's angles: f32[B, T, E/2] each."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope_frequencies(config))
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_scale
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the radians per position of every pair of head dimensions: f32[E/2]."""
    # In float32, as Hugging Face computes them: a frequency's rounding error grows with the
    # position,
    # and models are trained with these values.
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
    """Returns the share of each frequency that stays (1) instead of being divided by the factor
    (0)."""
    context = scaling.original_max_position_embeddings
    if scaling.kind == "linear":
        return np.zeros_like(frequencies)
    if scaling.kind == "llama3":
        turns = context * frequencies / (2 * math.pi)  # full rotations within the old context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return np.clip((turns - low) / (high - low), 0, 1)

    def dimension(turns: float) -> float:
        """The index of the pair that makes so many rotations."""
        radians = context / (turns * 2 * math.pi)
        return config.head_dim * math.log(radians) / (2 * math.log(config.rope_theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    pairs = np.arange(len(frequencies), dtype=np.float64)
    return 1 - np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
