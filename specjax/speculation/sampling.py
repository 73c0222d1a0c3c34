"""From logits to tokens: the greedy choice, and the distribution that is sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, Key

from pallas_kernels.row_sums import row_max, row_sum, running_sums
from specjax.checks import check_integer, check_number
from specjax.speculation.penalties import (
    NOTHING,
    Earlier,
    LogitBias,
    beside,
    penalize,
    read_logit_bias,
)

BLOCK = 128  # tokens; divides the vocabularies of nearly all models
_INFINITY = 0x7F800000  # its bits


Value = float | jax.Array | np.ndarray  # a number, or one per row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Draws the next token. Decoding without one is greedy.

    Applied in this order: bias, repetition penalty, presence and frequency penalty, temperature,
    top-k, top-p, min-p. With top_k=1, biases and penalties change greedy decoding.

    Each field is a number, or an array [B] with one number per row. It is a leaf of a pytree: other
    numbers do not compile a program anew, and a field may be traced. A field that is None is left
    out of the program.

    temperature: divides the logits; in [1e-6, 1e6].
    top_k: keep the k most probable tokens; None keeps all.
    top_p: keep the fewest most probable tokens whose probability reaches top_p; None keeps all.
    min_p: keep the tokens at least min_p times as probable as the most probable one; None keeps
        all.
    repetition_penalty: divides the positive logits, and multiplies the negative logits, of tokens
        that are already in the prompt or the output (Keskar et al. 2019); None: no penalty.
    presence_penalty: is subtracted from the logits of tokens that are already in the output; the
        prompt does not count; in [-2, 2]; None: no penalty. OpenAI defines it so.
    frequency_penalty: is subtracted from them as often as the output holds each; in [-2, 2]; None:
        no penalty.
    logit_bias: is added to the logits: a mapping of token ids to numbers in [-100, 100], a list
        with one mapping per row, or a `LogitBias`; None: no bias.

    Raises ValueError where a field is out of its range. A traced field is not checked.
    """

    temperature: Value = 1.0
    top_k: int | jax.Array | np.ndarray | None = None
    top_p: Value | None = None
    min_p: Value | None = None
    repetition_penalty: Value | None = None
    presence_penalty: Value | None = None
    frequency_penalty: Value | None = None
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | LogitBias | None = None

    def __post_init__(self) -> None:
        for name, (accepts, accepted) in _RANGES.items():
            given = getattr(self, name)
            if given is None and name != "temperature":
                continue
            value = _numbers(name, given)
            if not isinstance(value, jax.core.Tracer) and not np.all(accepts(np.asarray(value))):
                hint = "; leave `sampling` out to decode greedily" if name == "temperature" else ""
                raise ValueError(f"{name} must be {accepted}, got {value}{hint}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "logit_bias", read_logit_bias(self.logit_bias))

    @property
    def penalizes(self) -> bool:
        """Whether any penalty or bias is given."""
        return any(getattr(self, name) is not None for name in CHANGES)

    def without_penalties(self) -> Sampling:
        """The same without penalties and bias."""
        kept = (None if name in CHANGES else getattr(self, name) for name in _FIELDS)
        return _unflatten(None, kept)

    def filled_from(self, other: Sampling) -> Sampling:
        """The same with another's fields in the place of those that are None."""
        own = {name: getattr(self, name) for name in _FIELDS}
        return _unflatten(
            None, (getattr(other, name) if own[name] is None else own[name] for name in _FIELDS)
        )

    def per_row(self, rows: int) -> Sampling:
        """The same with arrays [B] as fields, without numbers that change nothing.

        Raises ValueError if a field has another shape.
        """

        def spread(path: Any, value: Any) -> jax.Array:
            field, *inner = path
            listed = np.shape(value)[-1:] if inner else ()  # of a bias, one list per row
            if np.shape(value) not in (listed, (rows, *listed)):
                one = "mapping" if inner else "number"
                raise ValueError(
                    f"{field.name} must be one {one} or one per row, shape ({rows},), "
                    f"got shape {np.shape(value)[: 1 if inner else None]}"
                )
            dtype = jnp.float32
            if field.name == "top_k" or "ids" in (key.name for key in inner):
                dtype = jnp.int32
                if not isinstance(value, jax.Array):
                    value = np.minimum(value, np.iinfo(dtype).max)
            return jnp.broadcast_to(jnp.asarray(value, dtype), (rows, *listed))

        given = ((name, getattr(self, name), idle) for name, idle in IDLE.items())
        left_out: dict[str, Any] = {
            name: None for name, x, idle in given if isinstance(x, float) and x == idle
        }
        fields: Sampling = jax.tree_util.tree_map_with_path(
            spread, dataclasses.replace(self, **left_out)
        )
        return fields


IDLE = {  # numbers that change nothing
    "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
_RANGES: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "temperature": (lambda x: (x >= 1e-6) & (x <= 1e6), "in [1e-6, 1e6]"),
    "top_k": (lambda x: x >= 1, "at least 1 or None"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "in (0, 1] or None"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "in [0, 1] or None"),
    "repetition_penalty": (lambda x: (x >= 1e-6) & (x <= 1e6), "in [1e-6, 1e6] or None"),
    "presence_penalty": (lambda x: (x >= -2) & (x <= 2), "in [-2, 2] or None"),
    "frequency_penalty": (lambda x: (x >= -2) & (x <= 2), "in [-2, 2] or None"),
}
_FIELDS = (*_RANGES, "logit_bias")
CHANGES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


def _children(sampling: Sampling) -> tuple[tuple[Any, Any], ...]:
    return tuple((jax.tree_util.GetAttrKey(name), getattr(sampling, name)) for name in _FIELDS)


def _unflatten(_: None, leaves: Iterable[Any]) -> Sampling:
    """Checks nothing: JAX puts placeholders into a tree, and values that a check would wait for."""
    sampling = object.__new__(Sampling)
    for name, leaf in zip(_FIELDS, leaves, strict=True):
        object.__setattr__(sampling, name, leaf)
    return sampling


jax.tree_util.register_pytree_with_keys(
    Sampling, lambda sampling: (_children(sampling), None), _unflatten
)


def _numbers(name: str, given: Any) -> Any:
    """Returns a field as a Python number, or as the array that it is. Raises ValueError unless it
    is numbers."""
    whole = name == "top_k"
    if not getattr(given, "ndim", 0) and not isinstance(given, jax.core.Tracer):
        return check_integer(name, given) if whole else check_number(name, given)
    kinds = (np.integer,) if whole else (np.integer, np.floating)
    if not any(jnp.issubdtype(given.dtype, kind) for kind in kinds):
        kind = "integers" if whole else "numbers"
        raise ValueError(f"{name} must be an array of {kind}, got {given.dtype}")
    if given.ndim > 1:
        raise ValueError(f"{name} must be a number or an array [B], got shape {given.shape}")
    return given


def greedy(logits: Float32[Array, "*B V"]) -> Int32[Array, "*B"]:
    """Returns the most probable token, the first of equals. f32[..., V] -> int32[...].

    XLA:CPU vectorizes a maximum but not an argmax. So this finds the block that holds the maximum,
    then its place in the block, which is some twenty times faster.
    """
    blocks = _blocks(logits, -jnp.inf)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def probabilities(
    logits: Float32[Array, "*B V"], sampling: Sampling, earlier: Earlier = NOTHING
) -> Float32[Array, "*B V"]:
    """Returns the distribution that `sampling` draws from. f32[..., V] -> f32[..., V], sums of 1.

    sampling: numbers, or arrays of the logits' first axis.
    earlier: the tokens that its penalties apply to.
    """
    assert not isinstance(sampling.logit_bias, Mapping | Sequence)
    logits = penalize(
        logits, earlier, bias=sampling.logit_bias, repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty, frequency=sampling.frequency_penalty,
    )  # fmt: skip
    # The maximum goes first, so that it is exactly 0 however small the temperature.
    logits = (logits - row_max(logits)) / beside(sampling.temperature, logits)
    if sampling.top_k is not None:
        logits = _keep(logits, jnp.ones_like(logits), beside(sampling.top_k, logits))
    if sampling.top_p is not None:  # rounded probabilities may sum to 1 before the last token
        top_p = beside(sampling.top_p, logits)
        logits = _keep(logits, _softmax(logits), jnp.where(top_p < 1, top_p, jnp.inf))
    if sampling.min_p is not None:  # the most probable token has exp(0) = 1
        logits = jnp.where(jnp.exp(logits) < beside(sampling.min_p, logits), -jnp.inf, logits)
    return _softmax(logits)


def _softmax(logits: jax.Array) -> jax.Array:
    """Normalizes the exponentials of logits whose largest is 0. f32[..., V] -> f32[..., V]."""
    weights = jnp.exp(logits)
    return weights / row_sum(weights)


def _keep(logits: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """Sets to -inf every token whose predecessors' weights sum to `limit` or more.

    Tokens are ordered by falling logit, then by token id. The largest logit must be 0. The limits
    are f32[..., 1]. A sort takes XLA:CPU fifty times as long, so the last kept logit is found by
    bisection: the bits of logits below 0 grow with their distance from it.
    """
    ranks = lax.bitcast_convert_type(jnp.abs(logits), jnp.int32)

    def before(rank: jax.Array) -> jax.Array:
        """Returns the weight of all tokens before those of a rank."""
        return row_sum(jnp.where(ranks < rank, weights, 0))

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        kept = before(middle) < limit
        return jnp.where(kept, middle, low), jnp.where(kept, high, middle - 1)

    low = jnp.zeros((*logits.shape[:-1], 1), jnp.int32)
    last, _ = lax.fori_loop(0, _INFINITY.bit_length(), halve, (low, low + _INFINITY))
    tied = ranks == last
    share = row_max(jnp.where(tied, weights, 0))  # the weight of each of them
    room = (limit - before(last)) / share
    return jnp.where((ranks < last) | tied & (_count_before(tied) < room), logits, -jnp.inf)


def _count_before(flags: jax.Array) -> jax.Array:
    """Counts the flags before each place of the last axis. bool[..., V] -> int32[..., V]."""
    blocks = _blocks(flags.astype(jnp.int32), 0)
    through = jnp.cumsum(blocks, axis=-1)
    totals = through[..., -1:]
    before = jnp.cumsum(totals, axis=-2) - totals + through - blocks
    return before.reshape(*flags.shape[:-1], -1)[..., : flags.shape[-1]]


def uniform_pairs(keys: Key[Array, " B"]) -> Float32[Array, "B 2"]:
    """Returns two random numbers per key, in [0, 1), for `draw`. keys: [B] -> f32[B, 2].

    The keys are Threefry's, come from `jax.random.fold_in` and serve nothing else. Such a key is a
    hash already, as random as the bits that it would seed: to hash it again would take XLA:CPU ten
    more kernels.
    """
    bits = jax.random.key_data(keys)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def draw(uniform: Float32[Array, "B 2"], distribution: Float32[Array, "B V"]) -> Int32[Array, " B"]:
    """Draws one token per row. f32[B, 2] in [0, 1), f32[B, V] -> int32[B].

    Weights need not sum to 1. A token of weight 0 is never drawn. A block of tokens is drawn
    first, then one of its tokens: two random numbers instead of one per token.
    """
    blocks = _blocks(distribution, 0)
    block = _pick(row_sum(blocks)[..., 0], uniform[:, :1])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _pick(inside, uniform[:, 1:])


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns the first place up to which the weights sum to more than that share of the total.

    f32[B, N], f32[B, 1] in [0, 1) -> int32[B]. Because sums are rounded, a place of weight 0 might
    seem to raise them; such places are skipped.
    """
    sums = running_sums(weights)
    places = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    positive = weights > 0
    reached = positive & (sums > uniform * sums[:, -1:])
    last = jnp.max(jnp.where(positive, places, 0), axis=-1)
    return jnp.minimum(jnp.min(jnp.where(reached, places, weights.shape[-1]), axis=-1), last)


def _blocks(values: jax.Array, fill: float) -> jax.Array:
    """Pads and splits the last axis: [..., V] -> [..., N, BLOCK]."""
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % BLOCK)]
    padded = jnp.pad(values, padding, constant_values=fill)
    return padded.reshape(*values.shape[:-1], -1, BLOCK)
