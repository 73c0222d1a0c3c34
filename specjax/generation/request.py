"""The options of a decode, checked once and passed on whole.

Every door (`decode`, `decode_many`, `generate`, `stream`) spells out its options for the reader
and makes one `Request` of them. Everything behind the doors takes the request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

import jax
import jax.numpy as jnp

from pallas_kernels.activations import Activation, check_activation
from pallas_kernels.cache_entries import check_cache_bits
from specjax.checks import check_integer
from specjax.drafting import Auto
from specjax.drafting.calibration import settled, settled_for_each
from specjax.drafting.suffix_memory import SuffixMemory
from specjax.generation.prompts import check_limits, check_logprobs, check_stop_tokens
from specjax.model.config import ModelConfig
from specjax.model.parallel import check_drafter
from specjax.model.params import Params, check_is_params
from specjax.model.room import check_cache
from specjax.speculation.drafter import Drafter, check_is_drafter
from specjax.speculation.penalties import LogitBias
from specjax.speculation.sampling import Sampling

THREEFRY = "threefry2x32"  # the generator of all keys inside
MOST_FORCED = 15  # tokens of a grammar that a round drafts


class Options(TypedDict, total=False):
    """The options that all doors share. `specjax.decode` says what each one means."""

    max_new_tokens: int
    drafter: Drafter | None
    sampling: Sampling | None
    stop_tokens: Sequence[int] | None
    cache_capacity: int | None
    cache_bits: int
    activation: Activation
    logprobs: int | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """The options of a decode, all checked. A pytree: what changes the program is static.

    drafter: proposes tokens.
    sampling: draws tokens; None: the greedy choice.
    max_new_tokens: the most tokens to generate per row.
    stop_tokens: tokens that end a row.
    cache_capacity: KV slots per row; None until the prompts are known (`for_width`).
    cache_bits: bits per cache entry.
    activation: activation precision of the target.
    logprobs: how many of the most probable tokens to record at each place; None: not even the
        log-probabilities of the new tokens.
    constrained: whether rows may have to keep to a grammar. Drafts of all rows are then matched
        (`rounds.step`), so that no row depends on the grammars of others.
    """

    drafter: Drafter
    sampling: Sampling | None
    max_new_tokens: int = jax.tree.static()
    stop_tokens: tuple[int, ...] = jax.tree.static()
    cache_capacity: int | None = jax.tree.static()
    cache_bits: int = jax.tree.static()
    activation: Activation = jax.tree.static()
    logprobs: int | None = jax.tree.static()
    constrained: bool = jax.tree.static(default=False)

    @classmethod
    def make(
        cls,
        params: Params,
        *,
        max_new_tokens: int = 64,
        drafter: Drafter | None = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        cache_capacity: int | None = None,
        cache_bits: int = 16,
        activation: Activation = "a16",
        logprobs: int | None = None,
        constrained: bool = False,
    ) -> Request:
        """Checks the options against the model. Arguments as in `specjax.decode`.

        Raises:
          ValueError: an option is out of its range or of another type.
        """
        drafter = Auto() if drafter is None else drafter
        _check_types(params, drafter, sampling)
        if sampling is not None and isinstance(sampling.logit_bias, LogitBias):
            sampling.logit_bias.check_vocabulary(params.config.vocab_size)
        check_drafter(params, drafter)
        check_activation(activation)
        cache_bits = check_integer("cache_bits", cache_bits)
        check_cache_bits(cache_bits)
        if cache_capacity is not None:
            cache_capacity = check_integer("cache_capacity", cache_capacity)
        return cls(
            drafter=drafter,
            sampling=sampling,
            max_new_tokens=check_integer("max_new_tokens", max_new_tokens),
            stop_tokens=check_stop_tokens(stop_tokens, params.config),
            cache_capacity=cache_capacity,
            cache_bits=cache_bits,
            activation=activation,
            logprobs=check_logprobs(logprobs, params.config),
            constrained=constrained,
        )

    @property
    def reach(self) -> int:
        """Slots of the KV cache behind a row's text that a round may write, also for tokens that a
        grammar forces."""
        return max(self.drafter.reach, MOST_FORCED if self.constrained else 0)

    def slots(self, config: ModelConfig, width: int) -> int:
        """KV slots per row for prompts of `width` tokens. Raises ValueError if they do not fit."""
        return check_limits(config, width, self.max_new_tokens, self.reach, self.cache_capacity)

    def for_width(self, params: Params, width: int, rows: int) -> Request:
        """The request for `rows` prompts of up to `width` tokens: `cache_capacity` is a number.

        Raises ValueError if the prompts do not fit the model, or the cache memory, or if the
        drafter cannot draft for the model.
        """
        capacity = self._capacity(params, width, rows)
        self.drafter.validate(params, width + self.max_new_tokens)
        drafter = self.drafter
        if isinstance(drafter, Auto):
            drafter = settled(drafter, params, rows, self.cache_bits, self.activation, width)
        return dataclasses.replace(self, drafter=drafter, cache_capacity=capacity)

    def _capacity(self, params: Params, width: int, rows: int) -> int:
        """`slots`, of which the memory holds so many rows. Raises ValueError if it does not."""
        capacity = self.slots(params.config, width)
        check_cache(params.config, rows, capacity, self.cache_bits, params.mesh)
        return capacity

    def for_row_counts(
        self, params: Params, width: int, counts: Sequence[int]
    ) -> dict[int, Request]:
        """`for_width` for each of several ascending numbers of rows, which may take turns on one
        state."""
        drafters: dict[int, Drafter] = dict.fromkeys(counts, self.drafter)
        self._capacity(params, width, counts[-1])  # before costs are measured with as many rows
        if isinstance(self.drafter, Auto):
            drafters |= settled_for_each(
                self.drafter, params, counts, self.cache_bits, self.activation, width
            )
        return {
            rows: dataclasses.replace(self, drafter=drafter).for_width(params, width, rows)
            for rows, drafter in drafters.items()
        }

    def sharing(self, params: Params) -> Request:
        """The request for many prompts, which share a memory of texts if the drafter takes one."""
        drafter = self.drafter
        if not isinstance(drafter, Auto) or drafter.memory is not None or params.mesh is not None:
            return self
        memory = SuffixMemory.create(params.config.vocab_size)
        return dataclasses.replace(self, drafter=dataclasses.replace(drafter, memory=memory))


def _check_types(params: object, drafter: object, sampling: object) -> None:
    check_is_params(params)
    check_is_drafter(drafter)
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a specjax.Sampling or None, got {sampling!r}")


def row_keys(sampling: Sampling | None, key: jax.Array | None, rows: int) -> jax.Array | None:
    """Returns one key per row, [B], or None for greedy decoding.

    key: one key, from which row i gets fold_in(key, i), or one key per row.
    """
    if sampling is None:
        if key is not None:
            raise ValueError("key goes with sampling: pass sampling=specjax.Sampling(...) as well")
        return None
    if key is None:
        raise ValueError("sampling needs key, for example key=jax.random.key(0)")
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key must be made by jax.random.key, got {key!r}")
    key = threefry(key)
    if key.ndim == 0:
        numbers = jnp.arange(rows, dtype=jnp.int32)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    if key.shape != (rows,):
        raise ValueError(f"key must be one key or one per row, shape ({rows},), got {key.shape}")
    return key


def threefry(key: jax.Array) -> jax.Array:
    """Returns keys as keys of Threefry, by the data of those that are of another generator.

    Others give all rows of a batch the numbers of the first row's key (`jax.vmap`).
    """
    if str(jax.random.key_impl(key)) == THREEFRY:
        return key
    own: jax.Array = jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl=THREEFRY)
    return own


def row_sampling(sampling: Sampling | None, rows: int) -> Sampling | None:
    """Returns the sampling of every row, in arrays [B], or None for greedy decoding.

    Raises ValueError if a field has neither one number nor one per row.
    """
    return None if sampling is None else sampling.per_row(rows)
