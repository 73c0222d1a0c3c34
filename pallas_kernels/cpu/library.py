"""Finds the C++ library.

An installed package has the library beside its modules. Python started in the root of a repository
imports the modules there, which have no library. It then uses the library of the installed package,
if that was built from the same sources.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.cpu.sources import HERE, digest

_FILE = "pallas_kernels/cpu/_native.so"
_ROOT = HERE.parent.parent
_INSTALL = f"install it again: pip install {_ROOT}"


class Found(NamedTuple):
    """The library's file, or None and the reason why there is none."""

    file: Path | None
    reason: str = ""


def find() -> Found:
    """The library that belongs to this package."""
    own = importlib.util.find_spec("pallas_kernels.cpu._native")
    found = _installed() if own is None or own.origin is None else Found(Path(own.origin))
    sources = digest()
    if found.file is not None and sources is not None and built_from(found.file) != sources:
        return Found(
            None, f"the C++ library in {found.file} is of other sources than {_ROOT}: {_INSTALL}"
        )
    return found


def built_from(file: Path) -> str | None:
    """The digest of the sources that a library was built from."""
    library = ctypes.CDLL(str(file))
    if not hasattr(library, "specjax_sources"):
        return None
    library.specjax_sources.restype = ctypes.c_char_p
    remembered: bytes = library.specjax_sources()
    return remembered.decode()


def _installed() -> Found:
    """The library of the package's installation."""
    try:
        distribution = importlib.metadata.distribution("specjax")
    except importlib.metadata.PackageNotFoundError:
        return Found(None, f"specjax is not installed, only imported from {_ROOT}: {_INSTALL}")
    file = Path(str(distribution.locate_file(_FILE)))
    if not file.is_file():
        reason = "specjax was installed without a working C++ compiler: install it with one"
        return Found(None, reason)
    return Found(file)
