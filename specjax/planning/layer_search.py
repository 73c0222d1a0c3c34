"""Searches for layers that a model can skip while drafting, greedily on a calibration text.

The set starts as all layers. Each step removes the layer whose removal keeps the most tokens of
the text equal to the whole model's choices, so there is a set of every size. The set with the
largest predicted speed-up wins (`planning.speedup`, at its best draft length).

Acceptance is measured in one teacher-forced pass: the share of positions at which both models'
greedy choices agree. In that pass the skipping model reads its own context. When it drafts, it
reads the whole model's context, which the verification wrote, so its drafts are kept a little more
often.

The cost of a pass is the bytes of its weights, which bound small batches (ML-SpecQD, section
III-B). `measure` times the set that is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from pallas_kernels.activations import Activation, check_activation
from pallas_kernels.settings import own_settings
from specjax.checks import check_integer
from specjax.model.config import ModelConfig
from specjax.model.kv_cache import KVCache
from specjax.model.layers import Layer
from specjax.model.parallel import embed
from specjax.model.params import Params, check_is_params
from specjax.model.transformer import block, linear, norm, pass_context
from specjax.planning.speed import LONGEST, Level, best_draft_lengths, speedup
from specjax.speculation.sampling import greedy


@dataclasses.dataclass(frozen=True)
class LayerSet:
    """Layers to draft with, for `LayerSkip`.

    layers: their numbers, in order.
    acceptance: the share of the text's positions at which they choose the whole model's token.
    cost: the cost of a pass, in passes of the whole model.
    draft_length: the best draft length.
    speedup: the predicted speed-up at that length.
    """

    layers: tuple[int, ...]
    acceptance: float
    cost: float
    draft_length: int
    speedup: float


def search_layers(
    params: Params,
    tokens: Integer[Array | np.ndarray, "S T"],
    *,
    activation: Activation = "a16",
    least: int = 1,
    longest: int = LONGEST,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[LayerSet, ...]:
    """Finds the layers to draft with.

    Takes about L³ / 6 passes of one layer over the text, since the states before a removed layer
    are kept.

    Args:
      params: the model.
      tokens: int32[S, T], calibration text: S sequences of T tokens, T at least 2, such as
        `specjax.calibration_tokens` makes.
      activation: the draft's activation precision, "a16", "a8" or "a4".
      least: layers that the smallest set keeps.
      longest: the longest draft to consider.
      progress: called with the number of removals done and of all removals.

    Returns:
      One set per size, the most promising first. If its `speedup` is below 1, skipping layers of
      this model does not pay.

    Raises:
      ValueError: an argument is out of its range, or a token outside the vocabulary.
    """
    check_is_params(params)
    count = params.config.num_layers
    tokens = _check(params.config, tokens, activation, least)
    kept = tuple(range(count))
    x = embed(params.embedding, tokens, params.config)
    wanted = _choices(params, _through(params, kept, x, "a16"), "a16")
    found: list[LayerSet] = []
    while len(kept) > least:
        agreements = _without_each(params, kept, x, wanted, activation)
        gone = max(kept, key=lambda layer: agreements[layer])
        kept = tuple(layer for layer in kept if layer != gone)
        found.append(_layer_set(params, kept, agreements[gone], longest))
        if progress is not None:
            progress(len(found), count - least)
    return tuple(sorted(found, key=lambda each: -each.speedup))


def pass_cost(params: Params, layers: tuple[int, ...]) -> float:
    """Bytes of the weights that a pass through these layers and the head reads, over those of a
    pass through all of them."""
    sizes = [_nbytes(layer) for layer in params.layers]
    head = _nbytes(params.head)
    return (sum(sizes[layer] for layer in layers) + head) / (sum(sizes) + head)


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _layer_set(
    params: Params, layers: tuple[int, ...], acceptance: float, longest: int
) -> LayerSet:
    cost = pass_cost(params, layers)
    best = best_draft_lengths(Level(acceptance), cost, longest)
    return LayerSet(layers, acceptance, cost, best[0].draft_length, speedup(best, cost))


def _without_each(
    params: Params, kept: tuple[int, ...], x: jax.Array, wanted: jax.Array, activation: Activation
) -> dict[int, float]:
    """Counts how often the model chooses `wanted` without each of the kept layers in turn.

    x: [S, T, D], the embedded text; wanted: int32[S, T].
    """
    shares = {}
    for place, layer in enumerate(kept):
        without = _through(params, kept[place + 1 :], x, activation)
        chosen = _choices(params, without, activation)
        shares[layer] = float(jnp.mean(chosen == wanted))
        x = _through(params, (layer,), x, activation)
    return shares


def _through(
    params: Params, layers: tuple[int, ...], x: jax.Array, activation: Activation
) -> jax.Array:
    """Returns the residual stream [S, T, D] after these layers."""
    for index in layers:
        # As the only layer of a model: one compilation serves all that are alike.
        alone = dataclasses.replace(
            params.config, num_layers=1, sliding_layers=None,
            sliding_window=params.config.window(index),
        )  # fmt: skip
        x = _run(params.layers[index], x, alone, activation)
    return x


@partial(jax.jit, static_argnames=("config", "activation"))
@own_settings()
def _run(layer: Layer, x: jax.Array, config: ModelConfig, activation: Activation) -> jax.Array:
    """Runs one layer over whole sequences without context."""
    rows, width, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    cache = KVCache.create(config, rows, width)
    context = pass_context(config, positions, activation=activation)
    return block(layer, 0, x, cache, context)[0]


@partial(jax.jit, static_argnames="activation")
@own_settings()
def _choices(params: Params, x: jax.Array, activation: Activation) -> jax.Array:
    """Returns the greedy choice at every position. [S, T, D] -> int32[S, T]."""

    def of_sequence(x: jax.Array) -> jax.Array:  # logits of all at once would take gigabytes
        return greedy(
            linear(norm(x, params.final_norm, params.config, x.dtype), params.head, activation)
        )

    tokens: jax.Array = jax.lax.map(of_sequence, x)
    return tokens


def _check(config: ModelConfig, tokens: Any, activation: Activation, least: int) -> jax.Array:
    check_activation(activation)
    found = np.asarray(tokens)
    if found.ndim != 2 or found.shape[0] < 1 or found.shape[1] < 2 or found.dtype.kind not in "iu":
        raise ValueError(
            "tokens must be int32[S, T], S sequences of at least two tokens, "
            f"got {found.dtype.name}{list(found.shape)}"
        )
    if found.min() < 0 or found.max() >= config.vocab_size:
        raise ValueError(
            f"tokens must be in 0 … {config.vocab_size - 1}, got {found.min()} … {found.max()}"
        )
    if not 1 <= check_integer("least", least) < config.num_layers:
        raise ValueError(
            f"least must be in 1 … {config.num_layers - 1}, fewer than the model's layers, "
            f"got {least}"
        )
    return jnp.asarray(found, jnp.int32)
