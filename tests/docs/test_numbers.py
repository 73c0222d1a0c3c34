"""Every measured number in README and docs is what a committed result says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.report import problems
from benchmarks.support import common
from benchmarks.support.quotes import refresh, unfounded
from benchmarks.support.results import Result, age, load_all

ROW = "nvidia_h100_80gb_hbm3/wide: speedup of drafter=QSpec(3) a8, nested; batch=1"


def test_every_page_agrees_with_the_results() -> None:
    assert list(problems()) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("It is 2.02× as fast.", "'2.02×' names no result"),
        ("It keeps 78 % of them.", "'78 %' names no result"),
        ("It writes 18.7 tokens per second.", "names no result"),
        ("A round takes 12 ms.", "names no result"),
        ("| a | b |\n| - | - |\n| x | 1.83 |\n", "not generated"),
        (f"1.35×<!-- {ROW} -->", "is 1.24"),
        (f"1.35<!-- {ROW} -->, so", "is 1.24"),
    ],
)
def test_a_number_that_no_result_holds_is_noticed(text: str, complaint: str) -> None:
    assert complaint in "\n".join(unfounded(text))


@pytest.mark.parametrize(
    "text",
    [
        f"1.25×<!-- {ROW} -->",
        "90 %<!-- epyc/products: median fraction of kernel=w4a8; m=1 -->",
        "5 seconds<!-- not measured -->",
        "`--rows 8` and 34 prompts × 128 tokens, on version 0.10.2",
    ],
)
def test_a_number_that_names_its_row_passes(text: str) -> None:
    assert list(unfounded(text)) == []


def test_a_note_must_name_one_row() -> None:
    with pytest.raises(ValueError, match="23 rows with field 'speedup'"):
        list(unfounded("1.38×<!-- nvidia_h100_80gb_hbm3/wide: speedup -->"))


def test_a_table_that_was_edited_is_noticed() -> None:
    text = refresh("<!-- results: refinement -->\n<!-- end of results -->\n")
    edited = text.replace("| 0.", "| 1.", 1)
    assert edited != text and refresh(edited) == text


def test_every_result_names_the_commit_that_was_measured() -> None:
    """One that holds all that was measured: the name of changed code ends in -dirty."""
    unnamed = [each.name for each in load_all() if not re.fullmatch("[0-9a-f]{7,}", each.commit)]
    assert unnamed == []
    assert "unknown commit" in age(Result("epyc/outputs", {"commit": "0" * 7}, []))


def test_a_tree_with_uncommitted_changes_writes_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "COMMIT", "abc1234-dirty")
    with pytest.raises(ValueError, match="commit your changes first"):
        common.write(tmp_path / "result.json", [])
    with pytest.raises(SystemExit):
        common.parser("").parse_args(["--json", str(tmp_path / "result.json")])
    assert "abc1234-dirty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(common, "COMMIT", "abc1234")
    common.write(tmp_path / "result.json", [])
    assert '"commit": "abc1234"' in (tmp_path / "result.json").read_text()
