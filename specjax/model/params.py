"""`Params`: the weights of a model as one pytree that carries its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from pallas_kernels import cpu
from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import Quantized, plain_weight
from pallas_kernels.interleave import by_rows, interleave
from pallas_kernels.nested import Nested
from pallas_kernels.weights import Weight, has_cheap_reading, is_format
from specjax.model.config import ModelConfig
from specjax.model.layers import (
    LINEARS,
    Layer,
    LayerStack,
    Linear,
    can_be_stacked,
    stack,
    with_one_form,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """A whole model.

    embedding: (V, D). It is looked up by rows, and serves as the head where the model is tied.
    layers: one `Layer` per block, or a `LayerStack` of them (`prepack`).
    final_norm: [D].
    lm_head: (V, D), or None where the embedding serves as the head (tied).
    config: static.
    mesh: the devices that the weights are divided over (`specjax.parallel`); None: one device.
        Static.
    """

    embedding: Weight
    layers: tuple[Layer, ...] | LayerStack
    final_norm: jax.Array
    lm_head: Linear | None
    config: ModelConfig = jax.tree.static()
    mesh: Mesh | None = jax.tree.static(default=None)

    def __repr__(self) -> str:
        """One line, whatever the leaves hold: JAX puts all kinds of things there."""
        leaves = jax.tree.leaves(self, is_leaf=is_format)
        formats = Bfloat12Weight | Nested | Quantized
        kinds = sorted({type(leaf).__name__ for leaf in leaves if isinstance(leaf, formats)})
        nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self))
        return (
            f"Params({self.config.model_type}, {_parameters(self.config) / 1e6:,.1f} million "
            f"parameters, {' and '.join(kinds) or self.config.dtype}, {nbytes / 1e6:,.1f} MB)"
        )

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads held here: the model's, or a device's part of them."""
        if isinstance(self.layers, LayerStack):
            return self.config.num_kv_heads
        return self.layers[0].k.weight.shape[0] // self.config.head_dim

    @property
    def head(self) -> Linear:
        """The output projection, (V, D)."""
        return Linear(self.embedding) if self.lm_head is None else self.lm_head

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as held."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def quantized(self) -> bool:
        """Whether a linear layer of a block has a cheap reading: is quantized, or nested."""
        return any(has_cheap_reading(linear.weight) for linear in self.linears())

    def linears(self) -> Iterator[Linear]:
        """The linear layers of all blocks, in order; those of a stack once, in stacks."""
        layers = self.layers
        for layer in (layers.arrays,) if isinstance(layers, LayerStack) else layers:
            for name in LINEARS:
                yield getattr(layer, name)


def check_is_params(params: object, name: str = "params") -> None:
    """Raises ValueError unless `params` is a model."""
    if not isinstance(params, Params):
        raise ValueError(f"{name} must be what specjax.load returns, got {type(params).__name__}")


def is_model(value: object) -> bool:
    """Whether a node of a tree is a model."""
    return isinstance(value, Params)


def map_models(function: Callable[[Params], object], tree: Any) -> Any:
    """Returns a tree with `function` of every model in the place of the model."""
    return jax.tree.map(
        lambda value: function(value) if is_model(value) else value, tree, is_leaf=is_model
    )


def prepack(params: Params) -> Params:
    """Returns the same model with its matrices in the order that this machine's kernels read
    fastest.

    On CPUs the rows of a matrix are interleaved (`pallas_kernels.interleave`). On CPUs and GPUs
    layers of one form are stacked: a program over them is compiled as fast for many layers as for
    few. On TPUs, and for a model that is divided over a mesh, nothing changes. `load` and
    `quantize` do this already; call it for models that are made in another way. Output is the same
    bit for bit. An embedding that is not also the head is only looked up by rows and stays as it
    is.

    Args:
      params: any model.

    Returns:
      The model, as large as before. It shares the matrices that were in that order already.
    """
    check_is_params(params)
    if params.mesh is not None:
        return params
    kept = (None if params.lm_head is None else params.embedding, params.layers)
    weights, structure = jax.tree.flatten(params, is_leaf=_is_weight)
    del params  # if nobody else holds the model, each weight is freed once its copy exists
    for index, weight in enumerate(weights):
        if not any(weight is each for each in kept):
            weights[index] = prepack_weight(weight)
    model = [jax.tree.unflatten(structure, weights)]
    del weights
    return stack_layers(model.pop())


def _is_weight(value: object) -> bool:
    return is_format(value) or isinstance(value, LayerStack)


def prepack_weight(weight: Weight) -> Weight:
    """Returns one weight in the order that this machine's kernels read fastest."""
    return interleave(weight) if jax.default_backend() == "cpu" and cpu.available() else weight


def stack_layers(params: Params) -> Params:
    """Returns the same model with its layers in one `LayerStack`.

    A model stays as it is where this machine's kernels do not read stacks, where its layers differ
    in form, and where some of them have a sliding window and others have none.
    """
    layers, config = params.layers, params.config
    if isinstance(layers, LayerStack) or not _kernels_read_stack(layers):
        return params
    layers = with_one_form(layers)
    if config.sliding_layers is not None or not can_be_stacked(layers):
        return params
    params, alike = dataclasses.replace(params, layers=()), list(layers)
    del layers
    return dataclasses.replace(params, layers=stack(alike))


def _kernels_read_stack(layers: tuple[Layer, ...]) -> bool:
    if jax.default_backend() == "gpu":  # they count a stack's elements in 32 bits
        return bool(max(leaf.size for leaf in jax.tree.leaves(layers)) * len(layers) < 2**31)
    return jax.default_backend() == "cpu" and cpu.available()


def unstack_layers(params: Params) -> Params:
    """Returns the same model with its layers one by one: the inverse of `stack_layers`."""
    return dataclasses.replace(params, layers=tuple(params.layers))


def stored(params: Params) -> Params:
    """Returns the same model row by row, as checkpoints hold it: the inverse of `prepack`."""
    model: Params = jax.tree.map(by_rows, unstack_layers(params), is_leaf=is_format)
    return model


def held(weight: Weight, dtype: str) -> Weight:
    """Returns a weight as a model of this dtype holds it.

    Plain arrays are rounded and matrices take the form that kernels read. Other formats stay as
    they are.
    """
    if not isinstance(weight, jax.Array):
        return weight
    rounded = weight.astype(dtype)
    return plain_weight(rounded) if rounded.ndim == 2 else rounded


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns (N, K) of every linear layer of a block."""
    d, f = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return {
        "q": (queries, d), "k": (keys, d), "v": (keys, d), "o": (d, queries),
        "gate": (f, d), "up": (f, d), "down": (d, f),
    }  # fmt: skip


def _parameters(config: ModelConfig) -> int:
    """Counts the parameters, but for norms and biases."""
    heads = 1 if config.tie_word_embeddings else 2
    blocks = sum(n * k for n, k in linear_shapes(config).values())
    return heads * config.vocab_size * config.hidden_size + config.num_layers * blocks
