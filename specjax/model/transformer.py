"""The model: one pure `forward` for every supported family.

Llama 2, 3, 3.1 and 3.2, CodeLlama, Mistral, Qwen2, Qwen2.5 and Qwen3 differ only in their
`ModelConfig` and in the weights that are present (biases, query and key norms).

Numerics: matrix products, norms, RoPE, softmax and logits are float32. Values between them are
rounded to `config.dtype` (`pallas_kernels.rounding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import cpu
from pallas_kernels.activations import Activation
from pallas_kernels.attention import attention
from pallas_kernels.hadamard import hadamard
from pallas_kernels.layers import Layers
from pallas_kernels.matmul import matmul, plane
from pallas_kernels.norms import rms_norm
from pallas_kernels.platforms import by_platform, deferred
from pallas_kernels.rope import rotate
from pallas_kernels.rounding import round_to
from pallas_kernels.stacks import Stacked, form
from pallas_kernels.swiglu import swiglu
from pallas_kernels.weights import has_cheap_reading
from specjax.model.config import ModelConfig
from specjax.model.kv_cache import KVCache
from specjax.model.layers import LINEARS, Layer, LayerStack, Linear, over_layers
from specjax.model.parallel import embed, gather, own_part
from specjax.model.params import Params
from specjax.model.rope import rope_angles

CHUNK = 64  # tokens of a prompt per pass, where prompts are read piece by piece


class PassContext(NamedTuple):
    """The values that all layers of one forward pass share.

    config: the model's configuration.
    positions: int32[B, T].
    rope: cosines and sines of the positions' angles, f32[B, T, E/2] each.
    ancestors: int32[B, T, depth], or None for a chain; see `forward`.
    activation: activation precision of the quantized layers.
    """

    config: ModelConfig
    positions: jax.Array
    rope: tuple[jax.Array, jax.Array]
    ancestors: jax.Array | None
    activation: Activation


def pass_context(
    config: ModelConfig,
    positions: Int32[Array, "B T"],
    ancestors: Int32[Array, "B T depth"] | None = None,
    activation: Activation = "a16",
) -> PassContext:
    """Computes the angles of RoPE once for all layers. Arguments as in `forward`."""
    return PassContext(config, positions, rope_angles(config, positions), ancestors, activation)


def forward(
    params: Params,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    cache: KVCache,
    ancestors: Int32[Array, "B T depth"] | None = None,
    activation: Activation = "a16",
    layers: tuple[int, ...] | None = None,
) -> tuple[Float32[Array, "B T V"], KVCache]:
    """Runs the model over T new tokens per row.

    The keys and values of the tokens are written to the cache slots lengths … lengths + T - 1, over
    whatever a draft left there. `cache.lengths` does not change: the caller decides which of the
    new entries to keep.

    Args:
      params: the weights.
      tokens: int32[B, T].
      positions: int32[B, T], for RoPE and sliding windows: cache.lengths plus the token's depth,
        which is 0 … T - 1 in a chain.
      cache: the context, and how much of it the tokens see.
      ancestors: int32[B, T, depth], for a tree: the new tokens on the path to each token, itself
        last, as `trees.ancestors` returns them. None: a chain.
      activation: activation precision of the quantized layers: "a16", "a8" or "a4".
      layers: the layers to run, in order; None for all.

    Returns:
      The logits, f32[B, T, V], and the cache with the new entries.
    """
    config = params.config
    context = pass_context(config, positions, ancestors, activation)
    x = embed(params.embedding, tokens, config)
    numbers = tuple(range(config.num_layers)) if layers is None else layers
    x, cache = _run_layers(params.layers, numbers, x, cache, context)
    x = norm(x, params.final_norm, config, x.dtype)
    return gather(linear(x, params.head, activation), config.vocab_size), cache


def prefill(
    params: Params,
    tokens: Int32[Array, "B T"],
    cache: KVCache,
    activation: Activation = "a16",
    layers: tuple[int, ...] | None = None,
) -> KVCache:
    """Returns the cache with the entries of a row's first tokens. T may be 0."""
    if tokens.shape[1] == 0:
        return cache
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(params, tokens, positions, cache, activation=activation, layers=layers)[1]


def prefill_in_chunks(
    params: Params,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    cache: KVCache,
    activation: Activation = "a16",
    layers: tuple[int, ...] | None = None,
) -> KVCache:
    """Returns the cache with the entries of a row's first `lengths` tokens; T may be far more.

    Wide arrays of short texts cost what the texts cost, not what the arrays would.
    """
    count, width = tokens.shape
    chunk = min(CHUNK, width)
    if chunk == 0:
        return cache
    padded = jnp.pad(tokens, ((0, 0), (0, -width % chunk)))

    def read(number: jax.Array, cache: KVCache) -> KVCache:
        start = jnp.full(count, number * chunk, jnp.int32)
        part = lax.dynamic_slice_in_dim(padded, number * chunk, chunk, axis=1)
        positions, cache = start[:, None] + jnp.arange(chunk), cache.with_lengths(start)
        return forward(params, part, positions, cache, activation=activation, layers=layers)[1]

    filled: KVCache = lax.fori_loop(0, -(-jnp.max(lengths) // chunk), read, cache)
    return filled.with_lengths(lengths)


def _run_layers(
    layers: tuple[Layer, ...] | LayerStack,
    numbers: tuple[int, ...],
    x: jax.Array,
    cache: KVCache,
    context: PassContext,
) -> tuple[jax.Array, KVCache]:
    """Runs the numbered layers: in one call where a kernel serves them, else one by one."""
    config, activation = context.config, context.activation

    def one_by_one(
        layers: Any, x: jax.Array, cache: KVCache, positions: Any, rope: Any, ancestors: Any
    ) -> tuple[jax.Array, KVCache]:
        context = PassContext(config, positions, rope, ancestors, activation)

        def step(layer: Layer, index: int | jax.Array, carry: tuple[jax.Array, KVCache]) -> Any:
            return block(layer, index, *carry, context)[:2]

        return over_layers(layers, numbers, step, (x, cache))

    def on_gpu(
        layers: Any, x: jax.Array, cache: KVCache, positions: Any, rope: Any, ancestors: Any
    ) -> tuple[jax.Array, KVCache]:
        refusal = deferred("gpu_layers", "layers_refusal")
        if refusal(x, cache.keys, ancestors, layer_weights(layers, activation)) is not None:
            return one_by_one(layers, x, cache, positions, rope, ancestors)
        run = deferred("gpu_layers", "layers")
        return run_stack(layers, x, cache, positions, rope, ancestors, run=run)

    run_stack = partial(_run_stack, numbers=numbers, config=config, activation=activation)
    operands = (layers, x, cache, context.positions, context.rope, context.ancestors)
    if not numbers or not isinstance(layers, LayerStack) or cache.bits < 16 or config.hadamard:
        return one_by_one(*operands)
    run: tuple[jax.Array, KVCache] = by_platform(
        *operands,
        result=jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (x, cache)
        ),
        default=one_by_one,
        cpu=partial(run_stack, run=cpu.layers),
        cuda=on_gpu,
    )
    return run


def _run_stack(
    layers: LayerStack,
    x: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    ancestors: jax.Array | None,
    *,
    run: Callable[..., tuple[jax.Array, Any, Any]],
    numbers: tuple[int, ...],
    config: ModelConfig,
    activation: Activation,
) -> tuple[jax.Array, KVCache]:
    """All layers in one call of a platform's kernels, which has the bits of `block`."""
    sight = [cache.sight(config.window(number)) for number in numbers]
    x, keys, values = run(
        x, cache.keys, cache.values, cache.lengths, positions, rope, ancestors,
        layer_weights(layers, activation),
        numbers=numbers, windows=[each[0] for each in sight], sinks=[each[1] for each in sight],
        eps=config.rms_norm_eps, head_scale=config.head_dim**-0.5,
    )  # fmt: skip
    return x, dataclasses.replace(cache, keys=keys, values=values)


def layer_weights(layers: LayerStack, activation: Activation) -> Layers:
    """The weights of a stack, as kernels that run all layers take them."""
    arrays = layers.arrays
    linears: list[Linear] = [getattr(arrays, name) for name in LINEARS]
    precisions = [_precision(linear, activation) for linear in linears]
    weights: list[Any] = [
        plane(linear.weight, each) for linear, each in zip(linears, precisions, strict=True)
    ]
    biases = [linear.bias for linear in linears]
    return Layers(
        arrays.attention_norm, arrays.mlp_norm, arrays.q_norm, arrays.k_norm, weights,
        [None if bias is None else bias.astype(jnp.float32) for bias in biases], precisions,
    )  # fmt: skip


class LinearInputs(NamedTuple):
    """The inputs of a block's linear layers, [B, T, K] each. Calibration reads them."""

    qkv: jax.Array
    o: jax.Array
    gate_up: jax.Array
    down: jax.Array


def block(
    layer: Layer,
    index: int | jax.Array,
    x: Float[Array, "B T D"],
    cache: KVCache,
    context: PassContext,
) -> tuple[Float[Array, "B T D"], KVCache, LinearInputs]:
    """Runs layer number `index` of `forward` on the residual stream x.

    Returns the residual stream, the cache with the new entries, and the inputs of the linear
    layers.
    """
    attended, cache, qkv, o = _attention_block(layer, index, x, cache, context)
    x = _add(x, attended)
    hidden, gate_up, down = _mlp_block(layer, x, context)
    return _add(x, hidden), cache, LinearInputs(qkv, o, gate_up, down)


def linear(
    x: Float[Array, "*rows K"], layer: Linear, activation: Activation
) -> Float32[Array, "*rows N"]:
    """Applies one linear layer: [..., K] -> f32[..., N]."""
    return linears(x, (layer,), activation)[0]


def linears(
    x: Float[Array, "*rows K"], layers: tuple[Linear, ...], activation: Activation
) -> tuple[Float32[Array, "*rows _"], ...]:
    """Applies linear layers that read the same x: [..., K] -> f32[..., N] each.

    Layers that are not quantized read x in 16 bits, whatever `activation` is.
    """
    precisions = {_precision(layer, activation) for layer in layers}
    if len(precisions) == 2:
        return tuple(linear(x, layer, activation) for layer in layers)
    products = matmul(x, tuple(layer.weight for layer in layers), *precisions)
    return tuple(
        y if layer.bias is None else y + layer.bias.astype(jnp.float32)
        for y, layer in zip(products, layers, strict=True)
    )


def _precision(layer: Linear, activation: Activation) -> Activation:
    """The activation precision at which a layer is multiplied."""
    return activation if has_cheap_reading(form(layer.weight)) else "a16"


def norm(
    x: Float[Array, "*rows D"], scale: jax.Array | Stacked, config: ModelConfig, dtype: DTypeLike
) -> Float[Array, "*rows D"]:
    """Applies the root-mean-square norm over the last axis and rounds to `dtype`."""
    normed: jax.Array = rms_norm(x, scale, config.rms_norm_eps, dtype)
    return normed


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    """Adds y: f32, whole or a device's part, to the residual stream x in its own dtype."""
    part = own_part(x, y.shape[-1])
    return gather(round_to(part.astype(jnp.float32) + y, x.dtype), x.shape[-1])


def _attention_block(
    layer: Layer, index: int | jax.Array, x: jax.Array, cache: KVCache, context: PassContext
) -> tuple[jax.Array, KVCache, jax.Array, jax.Array]:
    """x: [B, T, D] -> f32[B, T, D], the cache with the new entries, and the inputs of qkv and o.

    Under a mesh q, k, v, attention and the first result are the device's part.
    """
    config, activation = context.config, context.activation
    b, t, _ = x.shape
    normed = norm(x, layer.attention_norm, config, x.dtype)

    q, k, v = (
        y.reshape(b, t, -1, config.head_dim)
        for y in linears(normed, (layer.q, layer.k, layer.v), activation)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q = norm(q, layer.q_norm, config, jnp.float32)
        k = norm(k, layer.k_norm, config, jnp.float32)
    if cache.bits == 16:
        q, cache = cache.write_rotated(index, q, k, v, context.rope, x.dtype)
    else:
        q, k = (rotate(y, *context.rope, jnp.float32) for y in (q, k))
        if config.hadamard:  # the scores stay the same; keys lose less in rounding
            q, k = (hadamard(y) for y in (q, k))
        cache = cache.write(index, round_to(k, x.dtype), round_to(v, x.dtype))
        q = round_to(q, x.dtype)
    window, sinks = cache.sight(config.window(index))
    mixed = attention(
        q, cache.keys, cache.values, cache.lengths, context.positions, context.ancestors, index,
        window=window, sinks=sinks, head_scale=config.head_dim**-0.5,
    )  # fmt: skip
    if config.hadamard:
        mixed = hadamard(gather(mixed, config.num_heads, axis=-2), axis=-2)
    mixed = round_to(mixed.reshape(b, t, -1), x.dtype)
    mixed = gather(mixed, config.num_heads * config.head_dim)
    return linear(mixed, layer.o, activation), cache, normed, mixed


def _mlp_block(
    layer: Layer, x: jax.Array, context: PassContext
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """SwiGLU. x: [B, T, D] -> f32[B, T, D], and the inputs of gate and down."""
    config, activation = context.config, context.activation
    normed = norm(x, layer.mlp_norm, config, x.dtype)
    gate, up = linears(normed, (layer.gate, layer.up), activation)
    if config.hadamard:
        hidden = hadamard(gather(swiglu(gate, up), config.intermediate_size))
        hidden = round_to(hidden, x.dtype)
    else:
        hidden = swiglu(gate, up, x.dtype)
    hidden = gather(hidden, config.intermediate_size)
    return linear(hidden, layer.down, activation), normed, hidden
