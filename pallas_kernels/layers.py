"""The weights of a model's layers, for kernels that run all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from pallas_kernels.activations import Activation
from pallas_kernels.weights import Weight


class Layers(NamedTuple):
    """The weights of L layers, each array with an axis L in front.

    attention_norm, mlp_norm: [L, D]. q_norm, k_norm: [L, E] or None.
    linears: q, k, v, o, gate, up and down, stacks of weights that kernels can read unchanged.
    biases: f32[L, N] or None for each of them.
    activations: the activation precision of each of them.
    """

    attention_norm: jax.Array
    mlp_norm: jax.Array
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    linears: Sequence[Weight]
    biases: Sequence[jax.Array | None]
    activations: Sequence[Activation]
