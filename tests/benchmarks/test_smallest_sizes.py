"""Benchmarks that measure a release, not a change, still run: each at its smallest size."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SHORT = "--prompts 1 --max-new-tokens 8"
SIZES = {
    "exactness.outputs": f"{SHORT} --batch 2 --max-prompt 32 --draft-length 2 --ablation",
    "exactness.chi_square": "--draft tiny-draft --samples 50 --rows 50 --drafters ANPD Auto",
    "memory.footprint": "--rounds 2",
    "memory.parallel": "--virtual 2 --max-new-tokens 8",
    "quality.compression": f"{SHORT} --parts greedy --sequences 8 --keep 4 --drafters ANPD",
    "quality.refinement": f"{SHORT} --sequences 8",
    "quality.schemes": f"{SHORT} --tokens 1024 --only 'INT4 g128, RTN'",
    "speed.batching": f"{SHORT} --rows 4 --repeats 1",
    "speed.drafter_cost": "--rounds 2 --batch 1 --drafters plain ANPD --corpus 1000",
    "speed.layers": "--layers 2 --repeats 1",
    "speed.planner": f"{SHORT} --repeats 1",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SIZES)
def test_runs(name: str, data: Path) -> None:
    sizes = [*shlex.split(SIZES[name]), "--data", str(data)]
    command = [sys.executable, "-m", f"benchmarks.{name}", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]  # some judge what they measured
    assert " | " in done.stdout, f"no table: {done.stderr[-2000:]}"
