"""A cell of a benchmark: one drafter on one model, set of prompts and batch size.

A cell holds sums, from which its numbers follow, so that cells of several sets add up to one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specjax.bench.turns import geometric_mean
from specjax.checks import Check, Number, Whole, check_text, shown
from specjax.evaluation.runs import Kind, Record, read_results

PLAIN = "plain"  # the name of plain decoding, which every cell is compared with
_FASTEST = 1e9  # speed-up of a file's cell, or one over it: anything beyond is not a measurement


@dataclasses.dataclass(frozen=True)
class Cell:
    """The measurements of one drafter.

    model, texts, drafter: their names.
    rows: prompts decoded at a time.
    draft_length: N, the most tokens drafted per round.
    prompts, identical: prompts, and those whose output has plain decoding's tokens.
    ratios: plain decoding's time over the drafter's, for each batch of prompts.
    seconds: of one answer to all prompts, which are read within it.
    rounds, drafted, tested, accepted, generated: sums over the prompts, as in `specjax.Stats`.
    tested_at, kept_at: drafts at each place of a round that were decided on, and kept.
    draft_seconds, verify_seconds: of all rounds, run one half at a time.
    target_bytes, draft_bytes, state_bytes: the model, what the drafter holds beside it, and the KV
        caches with all that is kept per row.
    """

    model: str
    texts: str
    rows: int
    drafter: str
    draft_length: int
    prompts: int
    identical: int
    ratios: tuple[float, ...]
    seconds: float
    rounds: int
    drafted: int
    tested: int
    accepted: int
    generated: int
    tested_at: tuple[int, ...]
    kept_at: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    target_bytes: int
    draft_bytes: int
    state_bytes: int

    def record(self) -> Record:
        """The cell with its numbers, as JSON can hold them."""
        task = group_name(self.model, self.texts, self.rows)
        return {"task": task, "id": self.drafter, **dataclasses.asdict(self), **self.numbers()}

    def numbers(self) -> Record:
        """The numbers that follow from the sums; None where nothing was drafted.

        tokens_per_second: output tokens per second.
        speedup, speedup_low, speedup_high: over plain decoding, the geometric mean over the
            batches of prompts and its 95 % interval.
        kept: accepted over drafted, G / N.
        kept_by_place: the share of each place's tested drafts that was kept.
        tokens_per_round: output tokens per verification, τ.
        draft_seconds_per_token, verify_seconds_per_token: per output token.
        bytes: in all.
        """
        speedup = geometric_mean(self.ratios)
        return {
            "tokens_per_second": self.generated / self.seconds,
            "speedup": speedup.mean,
            "speedup_low": speedup.low,
            "speedup_high": speedup.high,
            "kept": self.accepted / self.drafted if self.drafted else None,
            "kept_by_place": [
                kept / tested
                for kept, tested in zip(self.kept_at, self.tested_at, strict=True)
                if tested
            ],
            "tokens_per_round": self.generated / self.rounds,
            "draft_seconds_per_token": self.draft_seconds / self.generated,
            "verify_seconds_per_token": self.verify_seconds / self.generated,
            "bytes": self.target_bytes + self.draft_bytes + self.state_bytes,
        }


def group_name(model: str, texts: str, rows: int) -> str:
    """The name of the cells that take turns."""
    return f"{model}, {texts}, rows={rows}"


def merged(cells: Sequence[Cell], texts: str) -> Cell:
    """The cell of several sets of prompts together: sums, and the largest state."""
    summed = (
        "prompts", "identical", "seconds", "rounds", "drafted", "tested", "accepted", "generated",
        "draft_seconds", "verify_seconds",
    )  # fmt: skip
    totals = {name: sum(getattr(cell, name) for cell in cells) for name in summed}
    return dataclasses.replace(
        cells[0],
        texts=texts,
        ratios=tuple(ratio for cell in cells for ratio in cell.ratios),
        tested_at=_added(cell.tested_at for cell in cells),
        kept_at=_added(cell.kept_at for cell in cells),
        state_bytes=max(cell.state_bytes for cell in cells),
        **totals,
    )


def read_cells(path: Path) -> tuple[Record, list[Cell]]:
    """The settings and the cells of a file that `specjax bench` wrote, whose run may not have
    ended.

    Raises ValueError if the file holds anything else.
    """
    settings, records = read_results(path, MEASURED)
    return settings, [cell_of(record, path) for record in records]


def cell_of(record: Record, path: object) -> Cell:
    """The cell in a record. Raises ValueError if the record is not a whole one."""
    names = [field.name for field in dataclasses.fields(Cell)]
    missing = [name for name in names if name not in record]
    if missing:
        raise ValueError(f"{path} has no {missing[0]} in a cell: give another file")
    values = {name: record[name] for name in names}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    cell = Cell(**values | lists)
    if len(cell.tested_at) != len(cell.kept_at) or not cell.ratios:
        raise ValueError(f"{path} has lists of other lengths in a cell: give another file")
    return cell


def _added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The sums at each place; drafters of one name may have lists of different lengths."""
    listed = list(counts)
    places = range(max(map(len, listed)))
    return tuple(sum(each[place] for each in listed if place < len(each)) for place in places)


@dataclasses.dataclass(frozen=True)
class _ListOf:
    """The check that a field lists values that pass another check."""

    check: Check

    def __call__(self, name: str, value: Any) -> None:
        """Raises ValueError unless it does."""
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {shown(value)}")
        for each in value:
            self.check(name, each)


_COUNT = Whole(0, 2**62)
_SOME = Whole(1, 2**62)
_SECONDS = Number(least=0, most=1e12)
MEASURED = Kind(
    "specjax bench",
    "specjax_bench",
    {
        **dict.fromkeys(("task", "id", "model", "texts", "drafter"), check_text),
        **dict.fromkeys(("rows", "prompts", "rounds", "generated"), _SOME),
        **dict.fromkeys(("draft_length", "identical", "drafted", "tested", "accepted"), _COUNT),
        **dict.fromkeys(("target_bytes", "draft_bytes", "state_bytes"), _COUNT),
        **dict.fromkeys(("draft_seconds", "verify_seconds"), _SECONDS),
        "seconds": Number(above=0, most=1e12),
        "ratios": _ListOf(Number(above=0, most=_FASTEST)),
        **dict.fromkeys(("tested_at", "kept_at"), _ListOf(_COUNT)),
    },
)
