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
GUIDES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "chat", "research", "convert")),
]
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
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_guide_runs(
    guide: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # some write models
    code = "\n".join(BLOCK.findall(guide.read_text()))
    exec(compile(code, str(guide), "exec"), {})
    assert capsys.readouterr().out.strip()
