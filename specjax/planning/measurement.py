"""Measures the formulas' inputs on this machine: acceptance by decoding, costs by timing.

Every pass runs in a compiled loop over the state that decoding begins with. The programs take
turns, so that a busy machine slows all of them, and only ratios of their medians are used.
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
from pallas_kernels.settings import own_settings
from specjax.checks import check_integer, shown
from specjax.drafting import Adaptive, Auto, Autoregressive, Drafter, MultiLevel
from specjax.generation.decoding import decode, start
from specjax.generation.prompts import Lengths, Prompt, normalize_prompt
from specjax.generation.request import row_keys, row_sampling
from specjax.model.params import Params, check_is_params
from specjax.planning.speed import Level, draft_time, speedup
from specjax.speculation.drafter import check_is_drafter
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState, Proposal
from specjax.speculation.timing import Timed, relative, seconds, verify_repeatedly
from specjax.speculation.verification import verify


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A drafter on one model and machine.

    levels: the target and any levels below it that are drafted for too; see `Level`. Costs are in
        plain passes of the target.
    draft_cost: the last drafter's time per draft.
    seconds: one plain pass of the target.
    tokens_per_round: tokens gained per target pass.
    """

    levels: tuple[Level, ...]
    draft_cost: float
    seconds: float
    tokens_per_round: float

    @property
    def speedup(self) -> float:
        """The speed-up by the formula, at the measured draft lengths."""
        return speedup(self.levels, self.draft_cost)

    def adaptive(self) -> Adaptive:
        """Returns the schedule of the first drafter with these costs."""
        target, *inner = self.levels
        per_draft = draft_time(target.draft_length, inner, self.draft_cost) / target.draft_length
        return Adaptive(draft_cost=per_draft, row_cost=target.row_cost)


def measure(
    params: Params,
    drafter: Drafter,
    prompts: Prompt,
    *,
    prompt_lengths: Lengths | None = None,
    rows: int | None = None,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    turns: int = 5,
) -> Measurement:
    """Measures the inputs of `speedup` and `Adaptive`.

    Acceptance comes from decoding all prompts. Passes are timed with the first prompts as context,
    at 1 … N + 1 tokens, where N is the drafter's draft_length. Whole rounds are timed too: the time
    of a lower level's round beyond its passes counts as verification. The formulas assume N drafts
    and the same α in every round, so schedules and confidences are left out of the measurement.

    Args:
      params: the target.
      drafter: a drafter that proposes chains; the models of a MultiLevel are measured each.
      prompts, prompt_lengths, max_new_tokens, sampling, key: as for `specjax.decode`.
      rows: prompts decoded at a time, which is the batch size that costs are measured at; None:
        all. The last batch is filled up with the first prompts.
      turns: the number of times that every pass is timed.

    Returns:
      The measurement.

    Raises:
      ValueError: as `specjax.decode` does; the last drafter proposes nothing, trees, or what pays
        (`Auto`); `turns` is less than 1, or `rows` not in 1 … the number of prompts.
    """
    check_is_params(params)
    if check_integer("turns", turns) < 1:
        raise ValueError(f"turns must be at least 1, got {turns}")
    check_is_drafter(drafter)
    drafter = _of_fixed_length(drafter)
    tokens, lengths = normalize_prompt(prompts, prompt_lengths, params.config)
    count = tokens.shape[0]
    keys, sampling = row_keys(sampling, key, count), row_sampling(sampling, count)
    batches = _batches(_Batch(tokens, lengths, keys, sampling), count, rows)
    models = _chain(_Model(params, "a16", None, drafter, 0))
    _check_chain(models[-1], batches[0], max_new_tokens)
    results = [
        decode(
            params, batch.tokens, prompt_lengths=batch.lengths, drafter=drafter, key=batch.keys,
            sampling=batch.sampling, max_new_tokens=max_new_tokens, stop_tokens=(),
        )
        for batch in batches
    ]  # fmt: skip
    costs, draft_cost, seconds = _costs(models, batches[0], max_new_tokens, turns)
    counts = jax.tree.map(
        lambda *parts: jnp.concatenate(parts),
        *((result.stats, *result.levels) for result in results),
    )
    levels = tuple(
        _level(measured, float(stats.token_acceptance))
        for measured, stats in zip(costs, counts, strict=False)
    )
    return Measurement(levels, draft_cost, seconds, float(counts[0].tokens_per_round))


class _Batch(NamedTuple):
    """Prompts that are decoded together.

    tokens, lengths: int32[B, T] and int32[B].
    keys, sampling: of every row; None: greedy.
    """

    tokens: jax.Array
    lengths: jax.Array
    keys: jax.Array | None
    sampling: Sampling | None

    def start(self, params: Params, drafter: Drafter, max_new_tokens: int) -> DecodeState:
        """The state before the first round."""
        return start(
            params, self.tokens, prompt_lengths=self.lengths, drafter=drafter, key=self.keys,
            sampling=self.sampling, max_new_tokens=max_new_tokens, stop_tokens=(),
        )  # fmt: skip


def _batches(prompts: _Batch, count: int, rows: int | None) -> list[_Batch]:
    """Returns the `count` prompts, `rows` at a time."""
    rows = count if rows is None else check_integer("rows", rows)
    if not 1 <= rows <= count:
        raise ValueError(f"rows must be in 1 … {count}, the number of prompts, got {rows}")
    numbers = (np.arange(first, first + rows) % count for first in range(0, count, rows))
    return [jax.tree.map(lambda leaf: leaf[chosen], prompts) for chosen in numbers]  # noqa: B023


class _Model(NamedTuple):
    """A model that verifies what `drafter` proposes; `lag` as in its `DecodeState`."""

    params: Params
    activation: Activation
    layers: tuple[int, ...] | None
    drafter: Drafter
    lag: int


def _check_chain(model: _Model, batch: _Batch, max_new_tokens: int) -> None:
    """Raises ValueError unless the last model's drafter proposes chains, whatever they cost."""
    drafter = model.drafter

    def proposal() -> Proposal:
        return drafter.propose(model.params, batch.start(model.params, drafter, max_new_tokens))[0]

    if drafter.draft_length == 0:
        raise ValueError(f"drafter must propose something, got {shown(drafter)}")
    if isinstance(drafter, Auto) or jax.eval_shape(proposal).parents is not None:
        raise ValueError(
            f"drafter must propose chains, neither trees nor what pays (Auto), got {shown(drafter)}"
        )


def _of_fixed_length(drafter: Any) -> Any:
    """The drafter without what ends its drafts early."""
    if isinstance(drafter, MultiLevel):
        return MultiLevel(_of_fixed_length(drafter.outer), _of_fixed_length(drafter.inner))
    if not dataclasses.is_dataclass(drafter):
        return drafter
    names = {field.name for field in dataclasses.fields(drafter)}
    changes = dict.fromkeys(names & {"schedule", "confidence"})
    return dataclasses.replace(drafter, **changes)  # type: ignore[type-var]


def _chain(model: _Model, depth: int = 0) -> list[_Model]:
    """The model, and of those below it all that are themselves drafted for."""
    if not isinstance(model.drafter, MultiLevel):
        return [model]
    outer = model.drafter.outer
    below = _Model(
        params=outer.model(model.params),
        activation=outer.activation,
        layers=outer.layers,
        drafter=model.drafter.inner,
        lag=outer.lag(model.lag, depth),
    )
    return [model, *_chain(below, depth + 1)]


def _costs(
    models: list[_Model], batch: _Batch, max_new_tokens: int, turns: int
) -> tuple[list[list[float]], float, float]:
    """Measures each model's costs of verifying 0 … N drafts, and the last drafter's cost per draft.

    Costs are in plain passes of the first model. The third result is the seconds of one.
    """
    passes = [_verifications(model, batch, max_new_tokens) for model in models]
    rounds = [
        _Rounds(model, depth, batch.start(model.params, model.drafter, max_new_tokens))
        for depth, model in enumerate(models)
    ]
    (*costs, whole), seconds = relative([*passes, rounds], turns)
    drafts = [max(each - cost[-1], 0.0) for each, cost in zip(whole, costs, strict=True)]
    for level in range(1, len(models)):
        inside = drafts[level - 1] / rounds[level - 1].below()
        more = max(inside - whole[level], 0.0)
        costs[level] = [cost + more for cost in costs[level]]
    return costs, drafts[-1] / models[-1].drafter.draft_length, seconds


def _verifications(
    model: _Model, batch: _Batch, max_new_tokens: int
) -> list[Callable[[int], float]]:
    """Returns timers of the model's passes over 0 … N drafts."""
    state = batch.start(model.params, Autoregressive(), max_new_tokens)
    holder = [dataclasses.replace(state, lag=model.lag)]

    def timer(drafts: int) -> Callable[[int], float]:
        def program(state: DecodeState, repeats: int) -> Timed:
            timed: Timed = verify_repeatedly(
                model.params, state, repeats, drafts, model.activation, model.layers
            )
            return timed

        return partial(seconds, program, holder)

    return [timer(drafts) for drafts in range(model.drafter.draft_length + 1)]


class _Rounds:
    """Times whole drafts for a model with so many levels above it, and their verification.

    Timed alone, the drafting model might stay in the processor's caches, from which the other model
    evicts it in every real round.
    """

    def __init__(self, model: _Model, depth: int, state: DecodeState) -> None:
        self._model = model
        self._holder = [dataclasses.replace(state, lag=model.lag, depth=depth)]

    def __call__(self, repeats: int) -> float:
        return seconds(self._program, self._holder, repeats)

    def _program(self, state: DecodeState, repeats: int) -> Timed:
        params, activation, layers, drafter, _ = self._model
        timed: Timed = _draft_and_verify(params, state, repeats, drafter, activation, layers)
        return timed

    def below(self) -> float:
        """Rounds of the level below per draft: those of the slowest row, as all wait for it."""
        [state], drafter = self._holder, self._model.drafter
        stats = drafter.levels(state.draft)[0]
        return float(jnp.max(stats.rounds / stats.generated)) * drafter.draft_length


@partial(jax.jit, static_argnames=("activation", "layers"), donate_argnames="state")
@own_settings()
def _draft_and_verify(
    params: Params,
    state: DecodeState,
    repeats: int,
    drafter: Drafter,
    activation: Activation,
    layers: tuple[int, ...] | None,
) -> Timed:
    """Makes and verifies the same draft repeatedly."""

    def one_round(_: jax.Array, carry: Timed) -> Timed:
        state, total = carry
        proposal, state = drafter.propose(params, state)
        verified, cache = verify(params, state, proposal, activation, layers)
        return dataclasses.replace(state, cache=cache), total + jnp.sum(verified.emitted)

    carry: Timed = lax.fori_loop(0, repeats, one_round, (state, jnp.int32(0)))
    return carry


def _level(costs: list[float], acceptance: float) -> Level:
    """A level whose passes over 0, 1 … drafts cost so much, and a line through them for longer ones
    that begins at the first."""
    drafts = np.arange(len(costs))
    row_cost = float(drafts @ (np.array(costs) - costs[0]) / (drafts @ drafts))
    return Level(acceptance, len(costs) - 1, costs[0], max(row_cost, 0.0), tuple(costs))
