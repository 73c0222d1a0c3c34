"""Tests tile products (AMX) on machines without them, with the built library and an emulator.

A separate process preloads the emulator (tests/native/amx_emulator.c) and runs the tests of
`matmul` and attention again. On a machine with tiles those tests cover AMX, and this file is
skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.cpu.native import instruction_sets
from tests.conftest import ROOT

SOURCE = Path(__file__).resolve().parents[1] / "native" / "amx_emulator.c"


@pytest.fixture
def emulator(tmp_path: Path) -> Path:
    """The emulator as a shared library."""
    if "avx512_amx" in instruction_sets():
        pytest.skip("this machine has tile products")
    if "avx512_bf16" not in instruction_sets() or sys.platform != "linux":
        pytest.skip("this machine lacks more than tile products")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = tmp_path / "amx_emulator.so"
    flags = ["-O2", "-mfma", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(path), "-lm"], check=True)
    return path


MATMUL, ATTENTION = "tests/kernels/test_matmul.py", "tests/kernels/test_cpu_attention.py"
BFLOAT12 = "tests/kernels/test_bfloat12.py"


@pytest.mark.parametrize(
    ("selection", "modules", "products"),
    [
        ("not exhaustive", (MATMUL, ATTENTION, BFLOAT12), 2),
        ("exhaustive", (MATMUL,), 2),
        ("exhaustive", (ATTENTION,), 1),
    ],
)
@pytest.mark.exhaustive
def test_by_tiles(
    selection: str, modules: tuple[str, ...], products: int, emulator: Path, tmp_path: Path
) -> None:
    """products: the number of kinds of tile products that the selection runs, int8 or bfloat16."""
    # AMX has no float32 tiles. pytest's fault handler would replace the emulator's.
    log = tmp_path / "log"
    environment = os.environ | {
        "LD_PRELOAD": str(emulator),
        "AMX_EMULATOR_LOG": str(log),
        "SPECJAX_AMX_EMULATED": "1",
    }
    options = ["-n", "0", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *modules]
    command += ["-k", "avx512_amx and not float32", "-m", selection]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip("the compiler of the library does not support tile products")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(int(count) > 0 for count in log.read_text().split()) == products
