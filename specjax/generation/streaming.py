"""Rounds as they are verified: `stream` for one prompt, `stream_many` for any number of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from specjax.files.kept_programs import kept
from specjax.generation.batch import Batch, open_batch
from specjax.generation.batch_rows import Gained, run_round
from specjax.generation.completion import Completion, completed
from specjax.generation.constraints import Constraint, Guide
from specjax.generation.decoding import start_request
from specjax.generation.guided import Constraints, guided_round, open_guides
from specjax.generation.prompts import check_ids
from specjax.generation.request import Request
from specjax.model.parallel import readable
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState


@dataclasses.dataclass(frozen=True)
class Round:
    """One draft-verify round of one row.

    accepted: drafted tokens that the target kept.
    rejected: drafted tokens from the first rejected one on; empty for a tree, whose other nodes do
        not follow each other.
    given: the target's own token, if the row still had room for it.
    completion: the prompt's result, in its last round; None in the others.
    logprobs: log-probabilities of `tokens`; None: not asked for.
    source: which part of the drafter proposed, such as "text" or "model" of an Auto; None: the
        drafter has one part, or nothing was drafted.
    drafted: tokens that were proposed, all nodes of a tree.
    """

    accepted: list[int]
    rejected: list[int]
    given: list[int]
    completion: Completion | None = None
    logprobs: Logprobs | None = None
    source: str | None = None
    drafted: int = 0

    @property
    def tokens(self) -> list[int]:
        """All tokens that the row gained."""
        return self.accepted + self.given


def stream(
    params: Params,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 64,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_bits: int = 16,
    logprobs: int | None = None,
    constraint: Constraint | None = None,
) -> Iterator[Round]:
    """Decodes one prompt and yields every round as soon as it is verified.

    The tokens are those of `specjax.decode`. The call itself checks the arguments and reads the
    prompt; each round is computed when it is asked for.

    Args:
      params: the model.
      prompt: token ids.
      max_new_tokens: the most tokens to generate, at least 1.
      drafter: proposes tokens; default Auto().
      sampling: draws tokens; None: the greedy choice.
      key: a random key; goes with `sampling`.
      stop_tokens: tokens that end the row (kept in the output); None: the model's own; () for none.
      cache_bits: bits per cache entry: 16, 8 or 4.
      logprobs: k: add the log-probability of every token, and the k most probable tokens at each
        place with theirs; None: add none. See `Logprobs`.
      constraint: a grammar that the output keeps to; None: it is free. See `Constraint`.

    Returns:
      The rounds.

    Raises:
      ValueError: as `specjax.decode` does; in a round, the model's logits are NaN or infinite,
        or the grammar cannot be followed.
    """
    request = Request.make(
        params, max_new_tokens=max_new_tokens, drafter=drafter, sampling=sampling,
        stop_tokens=stop_tokens, cache_bits=cache_bits, logprobs=logprobs,
        constrained=constraint is not None,
    )  # fmt: skip
    (guide,) = open_guides(params, request, constraint, 1)
    drafter, state = start_request(params, request, check_ids(prompt), key)
    return _stream_one(params, dataclasses.replace(request, drafter=drafter), state, guide)


def stream_many(
    params: Params,
    prompts: Iterable[Sequence[int]],
    *,
    rows: int = 8,
    max_new_tokens: int = 64,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] | None = None,
    cache_bits: int = 16,
    logprobs: int | None = None,
    constraint: Constraints = None,
) -> Iterator[tuple[int, Round]]:
    """Decodes any number of prompts and yields every round as soon as it is verified.

    The tokens are those of `specjax.decode_many`. The call itself checks the arguments; prompts are
    read and rounds are computed when the next one is asked for. A row whose prompt is finished gets
    the next prompt.

    Args:
      params: the model.
      prompts: token ids of every prompt. One that is not a list of token ids, or does not fit, has
        one round, without tokens, whose `completion` says why; the others go on.
      rows: prompts decoded at a time; under a mesh a multiple of its data axis.
      max_new_tokens: the most tokens to generate per prompt.
      drafter: proposes tokens; default Auto().
      sampling: draws tokens, each field one number or one per prompt; None: the greedy choice.
      key: a random key, from which prompt i gets fold_in(key, i), or one per prompt.
      stop_tokens: tokens that end a prompt's output; None: the model's own; () for none.
      cache_bits: bits per cache entry: 16, 8 or 4.
      logprobs: k: add the log-probability of every token, and the k most probable tokens at each
        place with theirs; None: add none. See `Logprobs`.
      constraint: a grammar that the outputs keep to, or one or None per prompt; None: they are
        free. See `Constraint`.

    Returns:
      Pairs of a prompt's number and its next round. The last round of each prompt has its
      `completion`.

    Raises:
      ValueError: there are no prompts, or an argument is out of its range.
    """
    request = Request.make(
        params, max_new_tokens=max_new_tokens, drafter=drafter, sampling=sampling,
        stop_tokens=stop_tokens, cache_bits=cache_bits, logprobs=logprobs,
        constrained=constraint is not None,
    )  # fmt: skip
    return _stream_batch(*open_batch(params, request, prompts, rows, key, constraint))


def _stream_one(
    params: Params, request: Request, state: DecodeState, guide: Guide | None
) -> Iterator[Round]:
    """Runs a state of one row to its end. The given state is donated."""
    completion, error = None, None
    run: Callable[..., Any] = run_round
    if guide is None:
        run = kept(run_round, params, state, request.drafter, activation=request.activation)
    while completion is None:
        if guide is None:
            state, gained = run(params, state, request.drafter)
        else:
            state, verified = guided_round(params, request, state, {0: guide})
            gained, error = Gained.of(verified), guide.error
        if state.finished[0] or error is not None:
            completion = completed(params, request, state, 0)
            completion = dataclasses.replace(completion, error=error or completion.error)
        own = jax.tree.map(lambda leaf: np.asarray(leaf)[0], readable(gained, params.mesh))
        yield dataclasses.replace(_round(own, request.drafter.sources), completion=completion)
    if completion.error is not None:
        raise ValueError(completion.error)


def _stream_batch(
    batch: Batch | None, refused: dict[int, Completion]
) -> Iterator[tuple[int, Round]]:
    """Drives a batch to its end, a round at a time."""
    for number, completion in refused.items():
        yield number, Round([], [], [], completion)
    while batch is not None and batch.busy:
        batch.fill()
        if batch.running:
            yield from rounds_of(batch).items()


def rounds_of(batch: Batch) -> dict[int, Round]:
    """Runs one round. Returns that of every running prompt, by its number, and frees the finished
    rows."""
    gained = batch.steps()
    finished, sources = batch.finished(), batch.job.request.drafter.sources
    taken = {}
    for row, prompt in list(batch.running.items()):
        one = _round(jax.tree.map(itemgetter((row, 0)), gained), sources)
        end = batch.take(row) if row in finished else None
        taken[prompt.number] = dataclasses.replace(one, completion=end)
    return taken


def _round(gained: Gained, sources: Sequence[str]) -> Round:
    """Returns one row's round. sources: names of the drafter's parts."""
    source = gained.source
    count = int(gained.counts)
    kept = min(int(gained.accepted), count)
    rejected = gained.proposed[int(gained.accepted) : int(gained.drafted)].tolist()
    return Round(
        accepted=gained.emitted[:kept].tolist(),
        rejected=rejected if gained.nodes is None else [],
        given=gained.emitted[kept:count].tolist(),
        logprobs=jax.tree.map(lambda leaf: leaf[:count], gained.logprobs),
        source=None if source is None or not gained.drafted else sources[int(source)],
        drafted=int(gained.drafted),
    )
