"""The numbers that README and docs quote: generated tables, and notes behind numbers in prose.

A table stands between two comments and is made by the function of that name:

    <!-- results: refinement -->
    <!-- end of results -->

A number in prose is followed by a comment that names its file, field and row; `median`, `min`,
`max` or `sum` before the field takes several rows together:

    1.25×<!-- nvidia_h100_80gb_hbm3/wide: speedup of drafter=QSpec(3) a8, nested; batch=1 -->
    90 %<!-- epyc/products: median fraction of kernel=w4a8; m=1 -->

A number that nothing here measured (a limit, a size that was chosen) says `<!-- not measured -->`;
so does the line before a table of such numbers.
`tests/docs/test_numbers.py` compares all of them with the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.support.results import (
    REDUCTIONS,
    RESULTS,
    Rows,
    figure,
    load,
    load_all,
    select,
    value,
)
from benchmarks.support.tables import table

BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
CODE = re.compile(r"^```.*?^```$|^    .*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
START, FIGURE, TIMES = r"(?<![\w.,])", r"(\d+(?:\.\d+)?)", r"×(?!\s?\d)|x\b|%"
UNIT = rf"{TIMES}|times as|tokens per \w+|tokens/s|ms\b|µs\b|s\b|seconds|minutes|[MG]B\b"
NUMBER = re.compile(
    rf"{START}(?:{FIGURE}\s(?:{UNIT})|{FIGURE}(?:{TIMES}))(?P<note>\s?<!-- not measured -->)?"
)
QUOTED = re.compile(rf"{START}{FIGURE}\s?({UNIT})?\s?<!-- (?P<note>[^\s:]+:\s.*?) -->", re.DOTALL)
UNMEASURED = re.compile(r"^<!-- not measured -->\n+(\|.*\n)+", re.MULTILINE)
CELL = re.compile(r"^\|.*\| \**\d+\.\d+\** \|.*$", re.MULTILINE)
SOURCE = re.compile(r"(\S+): (?:(median|min|max|sum) )?(.+?)(?: of (.*))?")
SCALE = {"%": 100.0, "MB": 1e-6, "GB": 1e-9, "minutes": 1 / 60}


def refresh(text: str) -> str:
    """The text with every generated table made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def unfounded(text: str) -> Iterator[str]:
    """Every measured number without a note, or unlike the row that its note names."""
    text = UNMEASURED.sub("", CODE.sub("", BLOCK.sub("", text)))
    for line in CELL.findall(text):
        yield f"a table of numbers is not generated: {line}"
    for found in QUOTED.finditer(text):
        shown, unit, note = found.groups()
        measured = SCALE.get(unit, 1.0) * _quoted(note)
        digits = len(shown.partition(".")[2])
        if f"{measured:.{digits}f}" != shown:
            yield f"{found[0]!r} is {measured}"
    for found in NUMBER.finditer(QUOTED.sub("", text)):
        if found["note"] is None:
            yield f"{found[0]!r} names no result"


def _quoted(note: str) -> float:
    """The number that a note names."""
    found = SOURCE.fullmatch(" ".join(note.split()))
    if found is None:
        raise ValueError(f"a note is `FILE: FIELD of KEY=VALUE; KEY=VALUE`, got {note!r}")
    name, reduction, field, where = found.groups()
    conditions = dict(pair.split("=", 1) for pair in where.split("; ")) if where else {}
    rows = load(name).rows
    if reduction is None:
        return float(value(rows, field, **conditions))
    return REDUCTIONS[reduction]([row[field] for row in select(rows, **conditions) if field in row])


INSTRUCT_RESULTS = "epyc/smollm2_drafters", "epyc/smollm2_drafters_8"
# Their cells, by the column that README shows.
INSTRUCT = {
    "batch 1": {"batch": 1, "temperature": 0.0},
    "batch 1, sampled": {"batch": 1, "temperature": 0.7},
    "batch 8": {"batch": 8, "temperature": 0.0},
    "batch 8, sampled": {"batch": 8, "temperature": 0.7},
}
HELD = {
    "gguf": "4 bits", "bfloat16": "bfloat16", "bfloat12": "12 bits, exact",
    "nested16": "nested, exact", "nested8": "8 bits",
}  # fmt: skip
# The model, in a drafter's name.
DRAFTER = re.compile(r"^(plain|nested|8 bits), |, (12 bits|16 bits|8 bits|nested)$")


def instruct() -> list[dict[str, Any]]:
    """SmolLM2's drafters on real prompts, what loses at batch 1 first; a row per column."""
    rows = [row for name in INSTRUCT_RESULTS for row in select(load(name).rows, kind="all")]
    columns = {name: select(rows, **cell) for name, cell in INSTRUCT.items()}
    bases = "plain, gguf", "plain, bfloat16"
    first = [row for row in columns["batch 1"] if row["drafter"] not in bases]
    lines = []
    for row in sorted(first, key=lambda row: row["speedup"]):
        drafter = row["drafter"]
        shown = "none" if drafter.startswith("plain") else DRAFTER.sub("", drafter)
        line: dict[str, Any] = {"drafter": shown, "model": HELD[row["target"]]}
        for name, cells in columns.items():
            line[name] = _of_drafter(cells, drafter)
        lines.append(line)
    return lines


def _of_drafter(rows: Rows, drafter: str) -> dict[str, Any] | None:
    return next(iter(select(rows, drafter=drafter)), None)


def _instruct() -> str:
    lines = instruct()
    for line in lines:
        line |= {name: _with_interval(line[name]) for name in INSTRUCT}
    return table(lines, list(lines[0]))


def _with_interval(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    middle, low, high = (row[f"speedup{end}"] for end in ("", "_low", "_high"))
    return f"{middle:.2f}× ({low:.2f} – {high:.2f})"


CPUS = {"epyc": "EPYC", "xeon_amx": "Xeon, AMX"}


def _never_slower() -> str:
    """`Auto` beside plain decoding: the cells of a machine, batch size and temperature, a line."""
    lines = []
    for result in load_all():
        if "never_slower" not in result.file:
            continue
        for cell in dict.fromkeys((row["batch"], row["temperature"]) for row in result.rows):
            rows = select(result.rows, batch=cell[0], temperature=cell[1])
            speedups, controls = ([row[name] for row in rows] for name in ("speedup", "control"))
            lines.append(
                {
                    "machine": CPUS[result.machine],
                    "batch": cell[0],
                    "temperature": str(cell[1]),
                    "cells": len(rows),
                    "below 0.98": sum(speedup < 0.98 for speedup in speedups),
                    "lowest": figure(min(speedups), 2, "×"),
                    "median": figure(median(speedups), 2, "×"),
                    "highest": figure(max(speedups), 2, "×"),
                    "plain beside plain": f"{min(controls):.2f} – {max(controls):.2f}×",
                }
            )
    lines.sort(key=lambda line: str(line["lowest"]))
    return table(lines, list(lines[0]))


Cells = dict[str, tuple[int, float]]  # batch size and temperature by column
ON_CPUS: Cells = {
    "batch 1": (1, 0.0),
    "batch 1, sampled": (1, 0.7),
    "batch 4": (4, 0.0),
    "batch 8": (8, 0.0),
}
ON_GPU: Cells = {"batch 1": (1, 0.0), "batch 8": (8, 0.0), "batch 32": (32, 0.0)}


def _wide() -> str:
    """A billion parameters on CPUs, what loses at batch 1 first."""
    lines = [
        {"machine": name, **line}
        for machine, name in CPUS.items()
        for line in _wide_lines(machine, ON_CPUS)
    ]
    return table(lines, list(lines[0]))


def _wide_on_gpu() -> str:
    lines = _wide_lines("nvidia_h100_80gb_hbm3", ON_GPU)
    return table(lines, list(lines[0]))


def _wide_lines(machine: str, columns: Cells) -> list[dict[str, str]]:
    results = [each for each in load_all() if each.machine == machine]
    rows = [row for each in results if each.file.startswith("wide") for row in each.rows]
    bases = "plain, 4 bits", "plain, 8 bits", "plain, bfloat16"
    measured: dict[str, dict[tuple[int, float], dict[str, Any]]] = {}
    for row in rows:
        if row["drafter"] not in bases:
            cell = row["batch"], row.get("temperature") or 0.0
            measured.setdefault(row["drafter"], {}).setdefault(cell, row)
    lines = []
    for name in sorted(measured, key=lambda name: measured[name][min(measured[name])]["speedup"]):
        drafter, _, model = name.rpartition(", ")
        line = {"model": model, "drafter": "none" if drafter == "plain" else drafter}
        cells = {column: measured[name].get(cell) for column, cell in columns.items()}
        lines.append(line | {column: _with_interval(row) for column, row in cells.items()})
    return lines


def _long_context() -> str:
    """Drafts that see a part of a long context, what loses for one row first."""
    results = [each for each in load_all() if each.file.startswith("smollm2_long")]
    by_place = {
        f"{row['context']:,} tokens, batch {row['batch']}": result.rows
        for result in results
        for row in result.rows[:1]
    }
    beside_plain = load("epyc/smollm2_long_1").rows[1:]
    lines = []
    for row in sorted(beside_plain, key=lambda row: row["speedup"]):
        line = {"drafter": row["drafter"]}
        for place, rows in sorted(by_place.items(), reverse=True):
            line[place] = _with_interval(_of_drafter(rows, row["drafter"]))
        lines.append(line)
    return table(lines, list(lines[0]))


def _spectra() -> str:
    """Tokens per verification of drafters without a model."""
    greedy, sampled = load("epyc/compression_greedy").rows, load("epyc/compression").rows
    lines = []
    for drafter in [row["drafter"] for row in select(greedy, part="greedy")][1:]:
        means = (
            value(rows, "mean", part=part, drafter=drafter)
            for rows, part in ((greedy, "greedy"), (sampled, "sampled"))
        )
        shown = (figure(mean, 2) for mean in means)
        lines.append(dict(zip(("drafter", "greedy", "sampled"), (drafter, *shown), strict=True)))
    return table(lines, ("drafter", "greedy", "sampled"))


def _refinement() -> str:
    lines = [
        {
            "what is kept": row["datastore"],
            "million tokens": figure(row["tokens"] / 1e6, 2),
            "greedy": figure(row["greedy"], 2),
            "sampled": figure(row["sampled"], 2),
        }
        for row in load("epyc/refinement").rows
    ]
    return table(lines, list(lines[0]))


SCHEMES = (
    ("RTN", "INT4 g128, RTN"),
    ("GPTQ", "INT4 g128, GPTQ"),
    ("AWQ", "INT4 g128, AWQ"),
    ("Atom", "INT4 g128, Atom"),
    ("Atom + GPTQ", "INT4 g128, Atom + GPTQ"),
    ("QuaRot", "INT4 g128, QuaRot"),
    ("QuaRot + GPTQ", "INT4 g128, QuaRot + GPTQ"),
    ("MXFP4", "MXFP4 (floor)"),
)


def _schemes() -> str:
    """Perplexity by activation precision, and acceptance of 4-bit drafts."""
    rows = load("epyc/schemes").rows
    lines = []
    for name, scheme in SCHEMES:
        line = {"method": name}
        for activation in ("a16", "a8", "a4"):
            line[f"perplexity, {activation}"] = figure(
                value(rows, f"ppl {activation}", scheme=scheme), 1
            )
        line["acceptance, a4"] = figure(value(rows, "accepted a4", scheme=scheme), 3)
        lines.append(line)
    return table(lines, list(lines[0]))


def _tiny_losses() -> str:
    """Held-out text at the end of the training of `tiny`."""
    last = json.loads((RESULTS / "tiny_training.jsonl").read_text().splitlines()[-1])
    lines = [
        {
            "kind": kind,
            "nats per token": figure(loss, 3),
            "bits per byte": figure(last["bits_per_byte"][kind], 3),
        }
        for kind, loss in last["validation"].items()
    ]
    return table(lines, list(lines[0]))


TABLES: dict[str, Callable[[], str]] = {
    "instruct": _instruct,
    "never_slower": _never_slower,
    "wide": _wide,
    "wide_on_gpu": _wide_on_gpu,
    "long_context": _long_context,
    "spectra": _spectra,
    "refinement": _refinement,
    "schemes": _schemes,
    "tiny_losses": _tiny_losses,
}
