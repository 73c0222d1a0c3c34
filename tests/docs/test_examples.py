"""The examples and the guides' Python run as they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.support.covering import representatives

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORTEST = ROOT / "examples" / "quantize_and_draft.py"  # to run
# Pages, and how many of their blocks run; what follows needs a corpus. `test_readme.py` runs the
# README.
GUIDES = {
    "index": None, "chat": None, "research": None, "convert": None, "structured": None,
    "drafters": 2,
}  # fmt: skip
BLOCK = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)


@pytest.mark.parametrize("example", representatives(EXAMPLES, SHORTEST), ids=lambda path: path.stem)
def test_example_runs(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert "identical to plain decoding: True" in capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.exhaustive
@pytest.mark.parametrize(("guide", "blocks"), GUIDES.items(), ids=GUIDES)
def test_guide_runs(
    guide: str,
    blocks: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # some write models
    page = ROOT / "docs" / f"{guide}.md"
    code = "\n".join(BLOCK.findall(page.read_text())[:blocks])
    assert code
    exec(compile(code, str(page), "exec"), {})
    assert capsys.readouterr().out.strip() or "print(" not in code
