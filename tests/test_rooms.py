"""The rooms keep to themselves: no import runs against the arrows of the design."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_NOT_IMPORT = {
    "pallas_kernels": ("specjax", "checkpoints_tools"),
    "specjax/drafting": ("specjax.decoding", "specjax.text", "checkpoints_tools"),
    "specjax/transformer.py": ("specjax.drafting", "specjax.decoding", "specjax.sampling"),
    "specjax/kv_cache.py": ("specjax.transformer", "specjax.params"),
    "specjax/sampling.py": ("specjax.transformer", "specjax.params", "specjax.drafting"),
    "specjax/acceptance.py": ("specjax.transformer", "specjax.params", "specjax.drafting"),
    "specjax/decoding.py": ("specjax.text", "specjax.cli", "checkpoints_tools"),
    "checkpoints_tools": ("specjax.decoding", "specjax.drafting", "specjax.cli"),
}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("room", MAY_NOT_IMPORT)
def test_no_arrow_runs_back(room: str) -> None:
    path = ROOT / room
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        for name in _imports(file):
            for forbidden in MAY_NOT_IMPORT[room]:
                assert not f"{name}.".startswith(f"{forbidden}."), f"{file} imports {name}"
