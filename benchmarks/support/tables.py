"""Markdown tables, and where the repository lies: all that the report needs of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table of some columns; a cell that a row lacks stays empty."""

    def cell(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
