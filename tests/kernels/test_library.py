"""A package finds its C++ library and uses it only if the sources match."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pallas_kernels import cpu
from pallas_kernels.cpu import library, native, sources
from tests.conftest import ROOT

needs_library = pytest.mark.skipif(not cpu.available(), reason="the C++ library was not built")
IMPORT = """
import warnings
warnings.simplefilter("error")
from pallas_kernels.cpu import native
print(native.__file__, native.find().file, *native.instruction_sets(), sep="\\n")
"""


def absent(*_: object) -> None:
    return None


@needs_library
def test_a_repository_uses_the_installed_library(tmp_path: Path) -> None:
    """-S skips .pth files, which an editable installation relies on."""
    paths = [str(ROOT), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-S", "-c", IMPORT], env=environment, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    module, file, *sets = found.stdout.splitlines()
    assert Path(module).is_relative_to(ROOT)
    assert not Path(file).is_relative_to(ROOT / "pallas_kernels")
    assert tuple(sets) == native.instruction_sets()


@needs_library
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    file = library.find().file
    assert file is not None and library.built_from(file) == sources.digest()
    monkeypatch.setattr(library, "digest", lambda: "0123456789abcdef")
    reason = library.find().reason
    assert f"{file} is of other sources than {ROOT}: install it again: pip install" in reason
    native.instruction_sets.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="is of other sources .* times slower"):
            assert native.instruction_sets() == ()
    finally:
        native.instruction_sets.cache_clear()


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    monkeypatch.setattr(importlib.metadata, "distribution", unknown)
    assert "specjax is not installed, only imported from" in library.find().reason
    (tmp_path / "specjax-1.dist-info").mkdir()
    bare = importlib.metadata.Distribution.at(tmp_path / "specjax-1.dist-info")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: bare)
    assert "installed without a working C++ compiler" in library.find().reason


def test_the_digest_tells_sources_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "HERE", tmp_path)
    assert sources.digest() is None
    (tmp_path / "src").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("flags")
    (tmp_path / "src" / "a.cc").write_text("one")
    one = sources.digest()
    (tmp_path / "src" / "notes.txt").write_text("of no account")
    assert sources.digest() == one
    (tmp_path / "src" / "a.cc").write_text("two")
    assert sources.digest() != one
