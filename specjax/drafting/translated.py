"""A draft model with another tokenizer.

Every round encodes the text so far for the draft model (`specjax.drafting.retokenize`, on the
host). The draft's KV cache keeps the entries of unchanged tokens; the rest is read again.

Greedy drafts are made in the draft's tokens and re-encoded in the target's, so any two tokenizers
work. Sampled drafts must be exact token for token. They are drawn from the tokens that both
vocabularies share, with the draft's distribution renormalized over them (Timor et al. 2025,
token-level intersection). Rejection sampling is exact for any draft distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.activations import Activation
from specjax.checks import check_integer
from specjax.drafting.chain import ChainDrafter, check_draft_params
from specjax.drafting.retokenize import TextTokenizer, Translation, translation
from specjax.drafting.schedules import Schedule
from specjax.model.kv_cache import KVCache
from specjax.model.layers import Linear
from specjax.model.parallel import own_part
from specjax.model.params import Params
from specjax.model.transformer import CHUNK, forward
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState, Proposal

_LAG = 3  # tokens that the first drafting pass reads before the last one
_CHUNK = 8  # tokens per pass where there are more of them
_LEAST_TEXT = 16  # tokens of text that the draft's cache must hold besides a draft


class TranslatedState(NamedTuple):
    """tokens: int32[B, S], whose entries the first cache.lengths slots of the cache hold."""

    tokens: jax.Array
    cache: KVCache
    schedule: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TranslatedDraft(ChainDrafter):
    """Drafts with a model whose tokenizer is not the target's.

    params: the drafting model.
    draft_tokenizer, target_tokenizer: what `specjax.load_tokenizer` returns for each.
    draft_length: the most tokens per draft, in either vocabulary.
    activation: the draft's activation precision.
    confidence: a row's draft ends with a token of smaller probability than this; None: never.
    schedule: how many of draft_length tokens to draft; None: all.
    capacity: tokens per row, text and draft, that the draft's own KV cache holds, at most the draft
        model's positions; None: twice the target's. A longer text loses its beginning, half of
        the capacity at a time.

    Raises ValueError where a field is out of its range.
    """

    params: Params = dataclasses.field(repr=False)
    draft_tokenizer: TextTokenizer = jax.tree.static()
    target_tokenizer: TextTokenizer = jax.tree.static()
    draft_length: int = jax.tree.static(default=5)
    activation: Activation = jax.tree.static(default="a16")
    confidence: float | None = jax.tree.static(default=None)
    schedule: Schedule | None = jax.tree.static(default=None)
    capacity: int | None = jax.tree.static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("draft_tokenizer", "target_tokenizer"):
            if not isinstance(getattr(self, name), TextTokenizer):
                raise ValueError(
                    f"{name} must be what specjax.load_tokenizer returns, "
                    f"got {getattr(self, name)!r}"
                )
        least = self.draft_length + _LEAST_TEXT
        if self.capacity is not None and check_integer("capacity", self.capacity) < least:
            raise ValueError(
                f"capacity must be at least draft_length + {_LEAST_TEXT} = {least}, "
                f"got {self.capacity}"
            )

    def validate(self, params: Params, positions: int) -> None:
        check_draft_params(self, self.params)
        _check_vocabulary("draft", self._translation.draft_size, self.params)
        _check_vocabulary("target", self._translation.target_size, params)
        least = self.draft_length + _LEAST_TEXT
        if self.params.config.max_position_embeddings < least:
            raise ValueError(
                f"draft_length={self.draft_length} needs {least} positions; the draft model has "
                f"{self.params.config.max_position_embeddings}"
            )

    def init(self, params: Params, state: DecodeState, width: int) -> TranslatedState:
        if state.sampling is not None and not (self._translation.target_ids >= 0).any():
            raise ValueError(
                "sampling drafts from the tokens that both vocabularies hold, and draft_tokenizer "
                "and target_tokenizer have none in common"
            )
        config, rows = self.params.config, state.tokens.shape[0]
        slots = 2 * state.cache.capacity if self.capacity is None else self.capacity
        slots = min(slots, config.max_position_embeddings)
        schedule = self.first_schedule(rows)
        empty = TranslatedState(
            jnp.zeros((rows, slots), jnp.int32),
            KVCache.create(config, rows, slots, state.cache.bits, self.params.num_kv_heads),
            schedule,
        )
        level = self._read(empty, state, CHUNK)
        return TranslatedState(level.tokens, level.cache, schedule)

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        draft: TranslatedState = state.draft
        level = self._read(draft, state, _CHUNK)
        sampled = state.sampling is not None
        model = self._shared_model() if sampled else self.params
        proposal, cache = self.draft(model, level, self.wanted(draft.schedule, state))
        draft = draft._replace(
            tokens=_append(level, proposal), cache=cache.with_lengths(_entries(level, proposal))
        )
        translated = self._share(proposal, state) if sampled else self._retell(proposal, state)
        return translated, dataclasses.replace(state, draft=draft)

    def _read(self, draft: TranslatedState, state: DecodeState, chunk: int) -> DecodeState:
        """Returns the state in the draft model's tokens, with all but at most _LAG of them in its
        cache.

        The tokens depend only on the row's text, not on its history, so rejected drafts of this
        level or another need no undoing.
        """
        slots = draft.tokens.shape[1]
        read = partial(self._translation.read, room=slots - self.draft_length, slots=slots)
        tokens, lengths = _on_host(read, (draft.tokens, draft.cache.lengths), state)
        same = jnp.cumprod(tokens == draft.tokens, axis=1).sum(axis=1)
        cached = jnp.minimum(jnp.minimum(draft.cache.lengths, same), lengths - 1)
        # A finished row is not asked for, and keeps what it has: a level's rows finish and go on.
        cached = jnp.where(state.finished, draft.cache.lengths, cached)
        lengths = jnp.where(state.finished, cached + 1, lengths)
        tokens = jnp.where(state.finished[:, None], draft.tokens, tokens)

        def read_on(cache: KVCache) -> KVCache:
            positions = cache.lengths[:, None] + jnp.arange(chunk)
            known = jnp.minimum(positions, slots - 1)
            new = jnp.take_along_axis(tokens, known, axis=1)
            _, written = forward(self.params, new, positions, cache, activation=self.activation)
            return written.with_lengths(jnp.minimum(cache.lengths + chunk, lengths - 1))

        cache = lax.while_loop(
            lambda cache: jnp.any(lengths - 1 - cache.lengths > _LAG),
            read_on,
            draft.cache.with_lengths(cached),
        )
        return dataclasses.replace(
            state, tokens=tokens, lengths=lengths, cache=cache, draft=None, lag=_LAG,
            vocab_size=self.params.config.vocab_size, sampling=_without_output(state.sampling),
        )  # fmt: skip

    @property
    def _translation(self) -> Translation:
        return translation(self.draft_tokenizer, self.target_tokenizer)

    def _retell(self, proposal: Proposal, state: DecodeState) -> Proposal:
        """Encodes drafted text in the target's tokens."""
        drafted = proposal.tokens, _counts(proposal)
        tokens, counts = _on_host(self._translation.propose, drafted, state, *drafted)
        return Proposal(tokens, counts)

    def _shared_model(self) -> Params:
        """Returns the draft model without the tokens that the target lacks."""
        target_ids = self._translation.target_ids
        size, head = self.params.config.vocab_size, self.params.head
        bias = jnp.full(size, -jnp.inf).at[jnp.asarray(np.flatnonzero(target_ids >= 0))].set(0)
        bias = own_part(bias, head.weight.shape[0])
        if head.bias is not None:
            bias += head.bias.astype(jnp.float32)
        return dataclasses.replace(self.params, lm_head=Linear(head.weight, bias))

    def _share(self, proposal: Proposal, state: DecodeState) -> Proposal:
        """Maps tokens of `_shared_model`, and their distributions, to the target's ids."""
        target_ids = self._translation.target_ids
        shared = np.flatnonzero(target_ids >= 0)
        draft_ids = np.zeros(state.vocab_size, np.int32)
        draft_ids[target_ids[shared]] = shared
        known = np.isin(np.arange(state.vocab_size), target_ids)
        assert proposal.distributions is not None
        distributions = jnp.where(known, proposal.distributions[..., draft_ids], 0)
        tokens = jnp.asarray(target_ids)[proposal.tokens]
        return dataclasses.replace(proposal, tokens=tokens, distributions=distributions)


def _on_host(
    function: Callable[..., Any], like: tuple[jax.Array, ...], state: DecodeState, *more: jax.Array
) -> tuple[jax.Array, ...]:
    """Calls a method of `Translation` on the running rows' texts; the results are shaped as
    `like`."""
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like)
    lengths = jnp.where(state.finished, 0, state.lengths)

    def call(*arrays: jax.Array) -> Any:
        return function(*(np.asarray(array) for array in arrays))  # no jax within: it may deadlock

    arrays: tuple[jax.Array, ...] = jax.pure_callback(
        call, shapes, state.tokens, lengths, *more, vmap_method="sequential"
    )
    return arrays


def _without_output(sampling: Sampling | None) -> Sampling | None:
    """The sampling of a draft whose tokens have other ids, and whose output begins elsewhere.

    Any distribution may draft, so this changes no output.
    """
    if sampling is None:
        return None
    return dataclasses.replace(
        sampling, presence_penalty=None, frequency_penalty=None, logit_bias=None
    )


def _counts(proposal: Proposal) -> jax.Array:
    """Counts the drafted tokens of every row, int32[B]."""
    if proposal.counts is not None:
        return proposal.counts
    rows, length = proposal.tokens.shape
    return jnp.full(rows, length, jnp.int32)


def _append(level: DecodeState, proposal: Proposal) -> jax.Array:
    """Appends the draft's tokens to the level's."""
    slots = level.lengths[:, None] + jnp.arange(proposal.tokens.shape[1])
    rows = jnp.arange(slots.shape[0])[:, None]
    return level.tokens.at[rows, slots].set(proposal.tokens, mode="drop")


def _entries(level: DecodeState, proposal: Proposal) -> jax.Array:
    """Slots of the cache that hold entries of those, int32[B]; of a finished row as many as before.

    The last draft has not been read.
    """
    drafted = level.lengths - 1 + _counts(proposal)
    return jnp.where(level.finished, level.lengths - 1, drafted)


def _check_vocabulary(role: str, tokens: int, params: Params) -> None:
    size = params.config.vocab_size
    if tokens > size:
        raise ValueError(
            f"{role}_tokenizer must be the {role} model's, of at most {size} tokens, got one with "
            f"token ids up to {tokens - 1}"
        )
