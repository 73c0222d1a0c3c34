"""The C++ library for Arm processors, built by a cross-compiler and run under an emulator.

`make neon-check` installs the tools. `tests/native/kernels_check.cc` compares every kernel with
float64. Integer products must equal this machine's, bit for bit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.cpu.library import find
from pallas_kernels.cpu.native import instruction_sets
from tests.conftest import ROOT

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # for the emulated processors
SOURCES = ROOT / "pallas_kernels" / "cpu"
PROGRAM = ROOT / "tests" / "native" / "kernels_check.cc"
MISSING = [tool for tool in (COMPILER, EMULATOR, "cmake", "g++") if shutil.which(tool) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


def link(compiler: str, library: Path, program: Path) -> Path:
    """Links the program that calls all kernels of a library."""
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES / 'src'}"]
    inputs = [str(PROGRAM), str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([compiler, *flags, *inputs, "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, linked with the library that CMake builds for Arm processors."""
    folder = tmp_path_factory.mktemp("neon")
    options = [
        "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={COMPILER}", f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    subprocess.run(["cmake", "-S", str(SOURCES), "-B", str(folder), *options], check=True)
    jobs = str(os.cpu_count())
    subprocess.run(["cmake", "--build", str(folder), "--parallel", jobs], check=True)
    return link(COMPILER, folder / "_native.so", folder / "check")


def hashes(*command: str) -> dict[str, str]:
    """Runs the program: the hash of the integer products by instruction set."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("max", ["neon_i8mm", "neon_dotprod", "portable"]),
        ("neoverse-n1", ["neon_dotprod", "portable"]),
        ("cortex-a72", ["portable"]),
    ],
)
def test_every_kernel(processor: str, expected: list[str], program: Path, tmp_path: Path) -> None:
    # The emulator would end a program that uses instructions which the processor lacks.
    found = hashes(EMULATOR, "-cpu", processor, "-L", LIBRARIES, str(program))
    assert list(found) == expected
    library = find().file
    if library is not None and instruction_sets()[0] != "portable":
        here = hashes(str(link("g++", library, tmp_path / "check")))
        assert set(found.values()) == {here[instruction_sets()[0]]}
