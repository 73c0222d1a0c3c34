"""Tables of cells in Markdown, the slowest first, so that losses are what is read first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from specjax.bench.cells import Cell, merged
from specjax.checks import printable, shown
from specjax.evaluation.runs import Record
from specjax.files.markdown import markdown_table

HEADER = (
    "model", "prompts", "rows", "drafter", "N", "tokens/s", "speed-up", "95 %", "kept / drafted",
    "kept by place", "tokens per pass", "draft ms", "verify ms", "MB", "same output",
)  # fmt: skip
ALL = "all"
_PLACES = 6  # of a round that are shown
_TOLD = ("processor", "device", "cores", "jax", "specjax", "commit", "cache_bits")


def format_cells(measured: Iterable[tuple[Record, Sequence[Cell]]]) -> str:
    """One table for every environment, in Markdown.

    Args:
      measured: the settings and the cells of each run.

    Returns:
      The tables. Cells of several sets of prompts are followed through by one of all of them.
    """
    tables: dict[str, list[Cell]] = {}
    for settings, cells in measured:
        tables.setdefault(_described(settings), []).extend(cells)
    return "\n\n".join(f"{place}\n\n{format_table(cells)}" for place, cells in tables.items())


def format_table(cells: Sequence[Cell]) -> str:
    """The table of cells of one environment, the smallest speed-up first."""
    shown = [*cells, *_together(cells)]
    shown.sort(key=lambda cell: cell.numbers()["speedup"])
    return markdown_table(HEADER, [_line(cell) for cell in shown])


def _described(settings: Record) -> str:
    """Where and how a run was measured, in one line."""
    told = [f"{name} {_value(settings[name])}" for name in _TOLD if settings.get(name)]
    new = settings.get("max_new_tokens")
    return ", ".join(told) + f"; up to {_value(new)} new tokens, greedy"


def _value(value: object) -> str:
    return printable(value) if isinstance(value, str) else shown(value)


def _together(cells: Sequence[Cell]) -> list[Cell]:
    """For each model, drafter and batch size with several sets of prompts, all of them together.

    A set that several runs measured counts once, by its last cell.
    """

    def key(cell: Cell) -> tuple[str, int, str]:
        return cell.model, cell.rows, cell.drafter

    groups = (
        {cell.texts: cell for cell in group} for _, group in groupby(sorted(cells, key=key), key)
    )
    return [merged(list(sets.values()), ALL) for sets in groups if len(sets) > 1]


def _line(cell: Cell) -> list[str]:
    numbers = cell.numbers()
    low, high = numbers["speedup_low"], numbers["speedup_high"]
    places = " ".join(f"{share:.2f}" for share in numbers["kept_by_place"][:_PLACES])
    more = " …" if len(numbers["kept_by_place"]) > _PLACES else ""
    same = cell.identical == cell.prompts
    return [
        _text(cell.model), _text(cell.texts), str(cell.rows), _text(cell.drafter),
        str(cell.draft_length), f"{numbers['tokens_per_second']:.1f}", f"{numbers['speedup']:.2f}",
        "–" if low is None else f"{low:.2f} – {high:.2f}",
        "–" if numbers["kept"] is None else f"{numbers['kept']:.3f}",
        places + more or "–", f"{numbers['tokens_per_round']:.2f}",
        f"{1e3 * numbers['draft_seconds_per_token']:.2f}",
        f"{1e3 * numbers['verify_seconds_per_token']:.2f}", f"{numbers['bytes'] / 1e6:.1f}",
        "yes" if same else f"{cell.identical} of {cell.prompts}",
    ]  # fmt: skip


def _text(name: str) -> str:
    return printable(name).replace("|", "\\|")
