"""The committed results: files, environments, rows, and how far each is behind the code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.support.tables import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
Rows = list[dict[str, Any]]

HIDDEN = ("part", "by_step", "by_chunk")


@dataclass(frozen=True)
class Result:
    """One file of `benchmarks/results/<machine>/`."""

    name: str  # "epyc/wide_8"
    environment: dict[str, Any]
    rows: Rows
    command: str | None = None  # unknown of results that are older than this field

    @property
    def machine(self) -> str:
        return self.name.split("/")[0]

    @property
    def file(self) -> str:
        return self.name.split("/")[1]

    @property
    def commit(self) -> str:
        return str(self.environment["commit"])


def load(name: str) -> Result:
    """The result of a name such as "epyc/wide_8"."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
    return Result(name, document["environment"], document["rows"], document.get("command"))


def load_all() -> list[Result]:
    files = sorted(RESULTS.glob("*/*.json"))
    return [load(str(file.relative_to(RESULTS).with_suffix(""))) for file in files]


def age(result: Result) -> str:
    """How many commits the code has moved on since the result was measured."""
    counted = subprocess.run(
        ["git", "rev-list", "--count", f"{result.commit}..HEAD"], cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    if counted.returncode != 0:
        return f"unknown commit ({result.commit})"
    return f"{counted.stdout.strip()} commits behind ({result.commit})"


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": median,
    "min": min,
    "max": max,
    "sum": sum,
}


def select(rows: Rows, **conditions: Any) -> Rows:
    """The rows whose fields have these values, compared as text."""
    return [
        row
        for row in rows
        if all(str(row.get(key)) == str(value) for key, value in conditions.items())
    ]


def value(rows: Rows, field: str, **conditions: Any) -> Any:
    """The field of the one row that meets the conditions."""
    chosen = select(rows, **conditions)
    if len(chosen) != 1 or field not in chosen[0]:
        raise ValueError(f"{len(chosen)} rows with field {field!r} meet {conditions}; wanted one")
    return chosen[0][field]


def plain(rows: Rows) -> str:
    """A table of all columns that any row has, in the order in which they appear."""
    shown = [{key.replace("_", " "): row[key] for key in row if key not in HIDDEN} for row in rows]
    return table(shown, list(dict.fromkeys(name for row in shown for name in row)))


def figure(number: float | None, digits: int, unit: str = "") -> str:
    """A cell of a table; a dash where nothing was measured."""
    return "–" if number is None else f"{number:.{digits}f}{unit}"
