"""Rounds in which rows keep to grammars: the host reads a proposal before the target verifies it.

A round asks the drafter for a proposal, writes one mask for every place of it, and verifies. Tokens
that the grammar forces are proposed before any other draft, and cost no drafting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import shown
from specjax.generation.ahead import Ahead
from specjax.generation.constraints import Constraint, Guide
from specjax.generation.request import MOST_FORCED, Request
from specjax.model.params import Params
from specjax.speculation.rounds import conclude, propose
from specjax.speculation.state import DecodeState, Proposal, Verified

Constraints = Constraint | Sequence[Constraint | None] | None  # of all prompts, or of each


def guided_round(
    params: Params,
    request: Request,
    state: DecodeState,
    guides: Mapping[int, Guide],
    ahead: Ahead | None = None,
    rows: int | None = None,
) -> tuple[DecodeState, Verified]:
    """Runs one round. The given state is donated, and the guides advance.

    guides: by row, for the rows that keep to a grammar. The other rows are free.
    ahead: the programs that `compile_ahead` has made; None: none.
    rows: how many rows run, the first ones; None: all. The others must be finished.
    """
    rows = len(state.finished) if rows is None else rows
    run = (ahead or Ahead()).run
    drafter = request.drafter
    running = np.flatnonzero(~np.asarray(state.finished))
    own = {row: guides[row] for row in running.tolist() if row in guides}
    forced = {row: tokens for row, guide in own.items() if (tokens := guide.forced(MOST_FORCED))}
    skips = drafter.skippable and _pays(len(forced), len(running), drafter.draft_length)
    if skips:
        proposal = _chain(forced, rows)
    else:
        proposal, state = run(propose, params, state, drafter, rows=rows)
    masks = _masks(proposal, own, state.vocab_size)
    proposal = dataclasses.replace(proposal, allowed=jnp.asarray(masks))
    state, verified = run(
        conclude, params, state, drafter, proposal, activation=request.activation,
        observed=not skips, rows=rows,
    )  # fmt: skip
    emitted, counts = np.asarray(verified.emitted), np.asarray(verified.count)
    for row, guide in own.items():
        guide.advance(emitted[row, : counts[row]].tolist())
    return state, verified


def compile_ahead(
    ahead: Ahead, params: Params, request: Request, state: DecodeState, rows: int
) -> None:
    """Compiles every program of guided rounds. state: in `jax.ShapeDtypeStruct`s; rows: as in
    `guided_round`."""
    drafter = request.drafter

    def compile_(proposal: Proposal, state: DecodeState, observed: bool) -> None:
        shape = (rows, proposal.tokens.shape[1] + 1, -(-state.vocab_size // 32))
        allowed: Any = jax.ShapeDtypeStruct(shape, np.uint32)
        proposal = dataclasses.replace(proposal, allowed=allowed)
        ahead.compile(
            conclude, params, state, drafter, proposal, activation=request.activation,
            observed=observed, rows=rows,
        )  # fmt: skip

    if drafter.skippable:
        compile_(_chain({}, rows), state, observed=False)
    if not drafter.skippable or drafter.draft_length:
        proposal, state = ahead.compile(propose, params, state, drafter, rows=rows)
        compile_(proposal, state, observed=True)


def _pays(forced: int, running: int, draft_length: int) -> bool:
    """Whether a round of forced tokens alone is better than one of the drafter's: where half of the
    rows have some, or the drafter never has any."""
    return draft_length == 0 or (forced > 0 and 2 * forced >= running)


def _chain(forced: Mapping[int, Sequence[int]], rows: int) -> Proposal:
    """The proposal of tokens by row."""
    tokens = np.zeros((rows, MOST_FORCED), np.int32)
    counts = np.zeros(rows, np.int32)
    for row, ids in forced.items():
        tokens[row, : len(ids)], counts[row] = ids, len(ids)
    return Proposal(jnp.asarray(tokens), jnp.asarray(counts))


def _masks(proposal: Proposal, guides: Mapping[int, Guide], vocab_size: int) -> np.ndarray:
    """Which tokens may follow each place of a proposal, uint32[B, N + 1, W]."""
    tokens = np.asarray(proposal.tokens)
    rows, n = tokens.shape
    counts, parents, verifiable = (
        None if each is None else np.asarray(each)
        for each in (proposal.counts, proposal.parents, proposal.verifiable)
    )
    masks = np.full((rows, n + 1, -(-vocab_size // 32)), ~np.uint32(0))
    for row, guide in guides.items():
        count = n if counts is None else int(counts[row])
        places = [(node, node) for node in range(count)]
        if parents is not None:
            may = range(count) if verifiable is None else np.flatnonzero(verifiable[row, :count])
            places = depth_first(parents[row], may)
        guide.allow(tokens[row].tolist(), places, masks[row])
    return masks


def depth_first(parents: np.ndarray, nodes: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """Returns nodes of a tree and their depths, each before its descendants, which follow it.

    parents: int32[N], parents[i] < i, -1 for a child of the last token.
    nodes: those that count; the descendants of another node do not.
    """
    children: dict[int, list[int]] = {}
    for node in nodes:
        children.setdefault(int(parents[node]), []).append(int(node))
    found, waiting = [], [(node, 0) for node in reversed(children.get(-1, []))]
    while waiting:
        node, depth = waiting.pop()
        found.append((node, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(node, []))]
    return found


def open_guides(
    params: Params, request: Request, constraints: Constraints, prompts: int
) -> list[Guide | None]:
    """Returns the guide of every prompt's output, at its beginning; None where it is free.

    Raises ValueError if there is not one constraint, or one per prompt, or one is refused.
    """
    listed = constraint_of_each(constraints, prompts)
    if params.mesh is not None and any(listed):
        raise ValueError("constraint must be None for a model that is divided over a mesh")
    size = params.config.vocab_size
    return [None if each is None else each.guide(size, request.stop_tokens) for each in listed]


def constraint_of_each(constraints: Constraints, prompts: int) -> Sequence[Constraint | None]:
    """Returns the constraint of every prompt. Raises ValueError if there is not one for each."""
    listed = constraints if isinstance(constraints, Sequence) else [constraints] * prompts
    for each in listed:
        if each is not None and not isinstance(each, Constraint):
            raise ValueError(
                "constraint must be what specjax.Constraint.json_schema, regex or lark returns, "
                f"or a list of them, got {shown(each)}"
            )
    if len(listed) != prompts:
        raise ValueError(
            f"constraint must be one for all prompts or one or None per prompt, {prompts}, "
            f"got {len(listed)}"
        )
    return listed
