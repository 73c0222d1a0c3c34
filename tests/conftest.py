"""What several test files share: where real data lies, and small random models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real prompts and models; tests that need it skip where it is absent."""
    path = Path(os.environ.get("SPECJAX_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no real data at {path}; set SPECJAX_DATA to its folder")
    return path
