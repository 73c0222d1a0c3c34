"""The tables of what was measured on GPUs."""

from __future__ import annotations

from benchmarks.support.compact import compact
from benchmarks.support.results import Rows, figure, plain
from benchmarks.support.tables import table


def checked(rows: Rows) -> str:
    """A line per check, implementation and precision of the activations."""
    names = "check", "implementation", "activation"
    kinds = dict.fromkeys(tuple(row.get(name) for name in names) for row in rows)
    lines = []
    for kind in kinds:
        check, implementation, activation = kind
        mine = [row for row in rows if tuple(row.get(name) for name in names) == kind]
        worst = max(
            (row["error_of_bound"] for row in mine if "error_of_bound" in row), default=None
        )
        lines.append(
            {
                "check": check, "kernels": implementation or "all",
                "activations": activation or "-", "cases": len(mine),
                "failed": sum(not row["passed"] for row in mine),
                "worst error of bound": figure(worst, 2),
            }
        )  # fmt: skip
    return table(lines, list(lines[0]))


def timed(rows: Rows) -> str:
    """Attention, then products."""
    attention = [row for row in rows if row["check"] == "attention speed"]
    columns = "cache_bits", "rows", "context", "tokens", "microseconds", "limit_microseconds"
    first = plain([{name: row[name] for name in columns} for row in attention])
    products = [
        {
            "kernel": row["kernel"], "M": row["m"], "K": row["k"], "N": row["n"],
            "microseconds": 1e6 * row["seconds"],
            "limit microseconds": 1e6 * row["limit_seconds"],
            "by": row["implementation"],
        }
        for row in rows if row["check"] == "speed"
    ]  # fmt: skip
    return first + "\n\n" + table(products, list(products[0]))


COUNTS = "device", "generated", "rounds", "drafted", "accepted", "passes", "seconds"


def wide(rows: Rows) -> str:
    """All columns but the device, which the heading names, and the counts behind the others."""
    return compact([{name: row[name] for name in row if name not in COUNTS} for row in rows])
