"""The pages of docs/measurements can be read: short, and with tables that show what varies."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.support.compact import compact
from benchmarks.support.pages import pages
from benchmarks.support.section_tables import by_drafter


def test_no_page_is_long() -> None:
    lines = {name: text.count("\n") for name, text in pages().items()}
    assert {name: count for name, count in lines.items() if count >= 300} == {}


def test_what_all_rows_share_stands_above_the_table() -> None:
    rows = [
        {"batch": 1, "drafter": "plain", "speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0},
        {"batch": 1, "drafter": "Auto", "speedup": 1.126, "speedup_low": 1.0, "speedup_high": 1.3},
    ]
    assert compact(rows) == (
        "In every row: *batch* 1.\n\n"
        "| drafter | speedup |\n| --- | --- |\n| plain | 1.00 |\n| Auto | 1.13 (1.00 – 1.30) |"
    )


def test_a_column_that_a_row_lacks_stays() -> None:
    assert compact([{"a": 1, "b": None}, {"a": 2}]) == (
        "| a | b |\n| --- | --- |\n| 1 | – |\n| 2 |  |"
    )


def test_losses_stand_first_and_kinds_of_text_are_left_to_the_file() -> None:
    common = {"batch": 1, "temperature": 0.0}
    rows = [
        {"drafter": "Auto", "kind": "all", "speedup": 1.1} | common,
        {"drafter": "QSpec", "kind": "all", "speedup": 0.9} | common,
        {"drafter": "QSpec", "kind": "prose", "speedup": 0.8} | common,
    ]
    table = by_drafter(rows)
    assert table.index("| QSpec | 0.9 |") < table.index("| Auto | 1.1 |")
    assert "prose" not in table and "kind" not in table


def test_a_page_that_no_result_makes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = tmp_path / "measurements" / "older.md"
    stray.parent.mkdir()
    stray.write_text("A table of last year.")
    monkeypatch.setattr(report, "DOCS", tmp_path)
    assert report.abandoned() == [stray]
