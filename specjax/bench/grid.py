"""The benchmark: drafters × batch sizes × sets of prompts × models.

The cells of one model, set and batch size are one group: plain decoding and all drafters answer
every batch of prompts in turn, so a ratio compares times that lie beside each other. A group's
cells are kept as soon as it has ended, and a killed run goes on with the next group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.bench.cells import MEASURED, PLAIN, Cell, cell_of, group_name
from specjax.bench.chunks import Chunk, chunks
from specjax.bench.environment import environment
from specjax.bench.halves import Halves, run_halves
from specjax.bench.mappings import forget_programs
from specjax.bench.turns import take_turns
from specjax.checks import check_integer
from specjax.drafting import Autoregressive, Drafter
from specjax.evaluation.digests import digest
from specjax.evaluation.runs import Results
from specjax.generation.decoding import DecodeResult, decode, failure
from specjax.generation.request import Request
from specjax.model.params import Params
from specjax.speculation.state import Stats


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, with the drafters that are compared on it and the texts that it continues.

    name: the model's name.
    params: the model.
    drafters: by name; plain decoding is compared without being named.
    texts: token ids of the prompts, by the name of their set.
    """

    name: str
    params: Params
    drafters: Mapping[str, Drafter]
    texts: Mapping[str, Sequence[Sequence[int]]]

    def __post_init__(self) -> None:
        if PLAIN in self.drafters:
            raise ValueError(f"drafters must not hold the name {PLAIN!r}: it is plain decoding's")


class _Group(NamedTuple):
    """Cells that take turns.

    drafters: by name, plain decoding first.
    max_new_tokens, cache_bits: as for `bench`.
    """

    subject: Subject
    texts: str
    rows: int
    drafters: Mapping[str, Drafter]
    chunks: list[Chunk]
    max_new_tokens: int
    cache_bits: int

    @property
    def name(self) -> str:
        return group_name(self.subject.name, self.texts, self.rows)

    @property
    def runs(self) -> int:
        """Answers in one turn."""
        return len(self.chunks) * len(self.drafters)


def bench(
    subjects: Sequence[Subject],
    *,
    rows: Sequence[int] = (1,),
    max_new_tokens: int = 64,
    turns: int = 3,
    cache_bits: int = 16,
    out: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Cell]:
    """Measures drafters beside plain decoding, greedily.

    Programs are compiled before they are timed. Prompts are read within the time. Every output is
    compared with plain decoding's. Compiled programs, the caller's too, are forgotten between
    groups where they take much of the mappings that Linux allows a process.

    Args:
      subjects: models, drafters and prompts.
      rows: batch sizes; prompts that do not fill the last batch are left out.
      max_new_tokens: the most tokens to generate per prompt.
      turns: how often all prompts are answered. They are answered once more in halves of rounds.
      cache_bits: bits per entry of the KV cache.
      out: a file of results, one cell per line; a killed run continues from it.
      progress: called with the answers so far and all answers.

    Returns:
      The cells, those of a group together, plain decoding's first.

    Raises:
      ValueError: an argument is out of its range, a set has fewer prompts than a batch, a drafter
        cannot draft for a model, a model gives NaN or infinite logits, or `out` holds other
        results.
    """
    counts = [("rows", each) for each in rows]
    for name, value in (*counts, ("turns", turns), ("max_new_tokens", max_new_tokens)):
        if check_integer(name, value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    groups = [_settled(group) for group in _groups(subjects, rows, max_new_tokens, cache_bits)]
    order = [(group.name, drafter) for group in groups for drafter in group.drafters]
    if len(set(order)) < len(order):
        raise ValueError("subjects must have different names, and rows different numbers")
    options = {"max_new_tokens": max_new_tokens, "cache_bits": cache_bits}
    settings = {} if out is None else _settings(subjects, rows, turns) | options
    show = _Counter(progress, (turns + 1) * sum(group.runs for group in groups))
    with Results(None if out is None else Path(out), settings, MEASURED) as results:
        for group in groups:
            if all((group.name, drafter) in results.records for drafter in group.drafters):
                show.advance((turns + 1) * group.runs)
                continue
            for cell in _measured(group, turns, show.advance):
                results.add(cell.record())
            forget_programs()
        results.finish(order)
        return [cell_of(results.records[key], out) for key in order]


class _Counter:
    """Counts answers, and tells how many there are."""

    def __init__(self, told: Callable[[int, int], None] | None, total: int) -> None:
        self._told, self._total, self._done = told, total, 0

    def advance(self, answers: int = 1) -> None:
        self._done += answers
        if self._told is not None:
            self._told(self._done, self._total)


def _groups(
    subjects: Sequence[Subject], rows: Sequence[int], max_new_tokens: int, cache_bits: int
) -> Iterator[_Group]:
    """All groups. Raises ValueError where a set does not fill a batch."""
    for subject in subjects:
        widest = subject.params.config.max_position_embeddings - max_new_tokens
        drafters = {PLAIN: Autoregressive(), **subject.drafters}
        for texts, prompts in subject.texts.items():
            for count in rows:
                if len(prompts) < count:
                    raise ValueError(
                        f"{texts} must have at least {count} prompts for a batch of {count}, "
                        f"got {len(prompts)}"
                    )
                cut = chunks(prompts, count, widest)
                yield _Group(subject, texts, count, drafters, cut, max_new_tokens, cache_bits)


def _settled(group: _Group) -> _Group:
    """The group with drafters as they decode. Raises ValueError where one cannot."""
    params, width = group.subject.params, max(chunk.width for chunk in group.chunks)

    def settled(drafter: Drafter) -> Drafter:
        request = Request.make(
            params, drafter=drafter, max_new_tokens=group.max_new_tokens,
            cache_bits=group.cache_bits,
        )  # fmt: skip
        return request.for_width(params, width, group.rows).drafter

    return group._replace(
        drafters={name: settled(drafter) for name, drafter in group.drafters.items()}
    )


def _settings(subjects: Sequence[Subject], rows: Sequence[int], turns: int) -> dict[str, Any]:
    """The choices that decide the results, and the place of the measurement."""
    measured = [
        {
            "name": subject.name,
            "model": digest(subject.params),
            "drafters": {name: digest(drafter) for name, drafter in subject.drafters.items()},
            "texts": {
                name: digest([np.asarray(prompt, np.int32) for prompt in prompts])
                for name, prompts in subject.texts.items()
            },
        }
        for subject in subjects
    ]
    return {"subjects": measured, "rows": list(rows), "turns": turns, **environment()}


def _measured(group: _Group, turns: int, ran: Callable[[], None]) -> list[Cell]:
    """The cells of a group."""
    params = group.subject.params

    def answer(drafter: Drafter, chunk: Chunk) -> DecodeResult:
        return decode(
            params, chunk.tokens, prompt_lengths=chunk.lengths, drafter=drafter,
            max_new_tokens=group.max_new_tokens, cache_bits=group.cache_bits,
        )  # fmt: skip

    def halved(drafter: Drafter, chunk: Chunk, most: int | None = None) -> Halves:
        return run_halves(
            params, drafter, chunk, max_new_tokens=group.max_new_tokens,
            cache_bits=group.cache_bits, most=most,
        )  # fmt: skip

    programs = {name: partial(answer, drafter) for name, drafter in group.drafters.items()}
    for chunk in {chunk.width: chunk for chunk in group.chunks}.values():
        for name, drafter in group.drafters.items():  # compiles
            _check_finite(group, programs[name](chunk))
            halved(drafter, chunk, most=1)
    seconds, results = take_turns(programs, group.chunks, turns, ran)
    for result in chain.from_iterable(results.values()):
        _check_finite(group, result)
    plain = [np.asarray(result.tokens) for result in results[PLAIN]]
    cells = []
    for name, drafter in group.drafters.items():
        halves = Halves.none(drafter.draft_length)
        for chunk in group.chunks:
            halves += halved(drafter, chunk)
            ran()
        ratios = np.exp(np.log(seconds[PLAIN] / seconds[name]).mean(axis=0))
        timed = float(seconds[name].mean(axis=0).sum())
        cells.append(_cell(group, name, results[name], plain, ratios, timed, halves))
    return cells


def _check_finite(group: _Group, result: DecodeResult) -> None:
    """Raises ValueError if a row failed: it has no whole output to compare or to time."""
    failed = np.flatnonzero(result.failed)
    if failed.size:
        raise ValueError(f"{group.name}: {failure(int(result.stats.generated[failed[0]]))}")


def _cell(
    group: _Group,
    name: str,
    results: Sequence[DecodeResult],
    plain: Sequence[np.ndarray],
    ratios: np.ndarray,
    seconds: float,
    halves: Halves,
) -> Cell:
    drafter = group.drafters[name]
    counts = {
        field.name: sum(int(getattr(result.stats, field.name).sum()) for result in results)
        for field in dataclasses.fields(Stats)
    }
    same = [
        np.all(np.asarray(result.tokens) == tokens, axis=1)
        for result, tokens in zip(results, plain, strict=True)
    ]
    reached = int(np.count_nonzero(halves.tested))
    return Cell(
        model=group.subject.name, texts=group.texts, rows=group.rows, drafter=name,
        draft_length=drafter.draft_length, prompts=group.rows * len(group.chunks),
        identical=int(np.concatenate(same).sum()), ratios=tuple(ratios.tolist()), seconds=seconds,
        tested_at=tuple(halves.tested[:reached].tolist()),
        kept_at=tuple(halves.kept[:reached].tolist()),
        draft_seconds=halves.draft_seconds, verify_seconds=halves.verify_seconds,
        target_bytes=group.subject.params.nbytes,
        draft_bytes=_own_bytes(drafter, group.subject.params), state_bytes=halves.state_bytes,
        **counts,
    )  # fmt: skip


def _own_bytes(drafter: Drafter, params: Params) -> int:
    """Bytes of a drafter's arrays that are not the model's."""
    held = {id(leaf): getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(drafter)}
    shared = {id(leaf) for leaf in jax.tree.leaves(params)}
    return sum(size for name, size in held.items() if name not in shared)
