"""The C++ library under the address and undefined-behaviour sanitizers.

The library is built without optimization, in seconds instead of minutes, for portable C++ and for
this machine's best instruction set. XLA calls it in a process that uses the sanitizer's memory
functions, which guard every array of XLA to the byte. Sanitizers do not check prefetches, which are
harmless out of bounds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from pallas_kernels.cpu.native import instruction_sets
from tests.conftest import ROOT

COMPILER = shutil.which("g++")
SOURCES = ROOT / "pallas_kernels" / "cpu" / "src"
FLAGS = (
    "-std=c++20", "-fPIC", "-O0", "-g1", "-ffp-contract=off", "-Wno-psabi",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)  # fmt: skip

# The instruction sets whose kernels others use for some of their work, and how a machine with the
# other is to be compiled for them.
BELOW = {
    "avx512_amx": ("avx512_bf16", ["-mno-amx-int8", "-mno-amx-bf16"]),
    "avx512_bf16": ("avx512_vnni", ["-mno-avx512bf16", "-mno-avxvnni"]),
    "avx2_vnni": ("avx2", ["-mno-avxvnni"]),
}


def runtimes() -> list[str]:
    """The libraries to load before Python; empty if one is missing.

    The C++ standard library is included, because sanitizers look for its exceptions at the start.
    """
    if COMPILER is None or not instruction_sets():
        return []

    def path(name: str) -> str:
        command = [str(COMPILER), f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    paths = [path(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    return paths if all(map(os.path.isabs, paths)) else []


RUNTIMES = runtimes()
pytestmark = [
    pytest.mark.exhaustive,  # compiles the library
    pytest.mark.skipif(not RUNTIMES, reason="needs g++ and its sanitizers"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of pallas_kernels whose library is built with sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    # A package without sources, such as an installed one, uses the library beside it.
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "src", "CMakeLists.txt")
    shutil.copytree(ROOT / "pallas_kernels", folder / "pallas_kernels", ignore=ignored)
    best = instruction_sets()[0]
    units = [
        (source, ["-isystem", jax.ffi.include_dir(), f"-DSPECJAX_BUILT_{best}"])
        for source in sorted(SOURCES.rglob("*.cc"))
        if source.name != "kernels.cc"
    ]
    machines = {best: ["-march=native"], "portable": []}
    name = best
    while name in BELOW:
        above, (name, without) = machines[name], BELOW[name]
        machines[name] = [*above, *without]
    for name, machine in machines.items():
        units.append((SOURCES / "common" / "kernels.cc", [f"-DSPECJAX_ISA={name}", *machine]))
    objects = [str(folder / f"{i}.o") for i in range(len(units))]

    def compile_unit(unit: tuple[Path, list[str]], target: str) -> None:
        source, flags = unit
        compile_(*flags, f"-I{SOURCES}", "-c", str(source), "-o", target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_unit, units, objects))
    compile_("-shared", *objects, "-o", str(folder / "pallas_kernels" / "cpu" / "_native.so"))
    return folder


def compile_(*arguments: str) -> None:
    subprocess.run([str(COMPILER), *FLAGS, *arguments], check=True)


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the sanitized package.

    -S skips the .pth files of site-packages, which may lead to the installed package.
    """
    environment = os.environ | {
        "LD_PRELOAD": ":".join(RUNTIMES),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python does not free all memory at exit
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(package), str(ROOT), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True)


def test_one_byte_past_an_array_of_xla_is_noticed(package: Path) -> None:
    code = (
        "import ctypes, jax.numpy as jnp; x = jnp.ones(3, jnp.uint8);"
        "ctypes.string_at(x.unsafe_buffer_pointer(), {} + x.nbytes)"
    )
    assert run(package, "-c", code.format(0)).returncode == 0
    result = run(package, "-c", code.format(1))
    assert result.returncode != 0 and "heap-buffer-overflow" in result.stderr


def test_every_handler_stays_within_its_arrays(package: Path) -> None:
    result = run(package, "-m", "tests.native.exercise")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("done\n")
