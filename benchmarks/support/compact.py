"""Tables for readers: what varies, rounded; what all rows share stands above, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.support.results import HIDDEN, Rows
from benchmarks.support.tables import table

ENDS = "_low", "_high"  # of an interval; they stand in brackets behind its middle
DIGITS = {"speedup": 2, "tokens_per_second": 1}


def compact(rows: Rows) -> str:
    """A table of the columns that vary, and a line of those that do not."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if name not in HIDDEN and not name.endswith(ENDS)]
    lines: list[dict[str, str]] = [{} for _ in rows]
    for name in names:
        shown = _format(name, [row.get(name) for row in rows])
        for line, row in zip(lines, rows, strict=True):
            if name in row:
                line[name.replace("_", " ")] = _cell(row, name, shown)
    titles = [name.replace("_", " ") for name in names]
    common = {
        title: lines[0].get(title, "")
        for title in titles
        if len(lines) > 1 and len({line.get(title, "") for line in lines}) == 1
    }
    varying = table(lines, [title for title in titles if title not in common])
    if not common:
        return varying
    values = ", ".join(f"*{title}* {value}" for title, value in common.items())
    return f"In every row: {values}.\n\n{varying}"


def _cell(row: dict[str, Any], name: str, shown: Callable[[Any], str]) -> str:
    low, high = (row.get(name + end) for end in ENDS)
    interval = "" if low is None or low == high else f" ({shown(low)} – {shown(high)})"
    return shown(row[name]) + interval


def _format(name: str, values: list[Any]) -> Callable[[Any], str]:
    """How a column's cells are written: its numbers with one count of digits after the point."""
    floats = [value for value in values if isinstance(value, float)]
    largest = max(map(abs, floats), default=0)
    digits = DIGITS.get(name, 1 if largest >= 100 else 2 if largest >= 1 else 3)
    while digits and all(value == round(value, digits - 1) for value in floats):
        digits -= 1

    def shown(value: Any) -> str:
        if value is None:
            return "–"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if floats and isinstance(value, int | float):
            return f"{value:.{digits}f}"
        return str(value)

    return shown
