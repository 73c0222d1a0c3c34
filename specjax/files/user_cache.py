"""The user's cache directory: compiled programs and measured costs outlast the process."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

import jax

_BROKEN = re.compile("Error reading persistent compilation cache entry for '([^'/]+)'")


def keep_compiled_programs() -> None:
    """Keeps what JAX compiles, so that a new process does not wait for it again.

    Nothing changes where JAX already has a place (JAX_COMPILATION_CACHE_DIR), is told to keep
    nothing (JAX_ENABLE_COMPILATION_CACHE=false), or where the directory cannot be made.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir:
        return
    place = kept_files("compiled")
    if place is None:
        return
    settings.update("jax_compilation_cache_dir", str(place))
    # A decode is a dozen programs, most of which compile within a tenth of a second.
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.02)


def place_of_programs() -> Path | None:
    """The directory of whole programs (`kept_programs`); None where JAX keeps none in ours."""
    settings: Any = jax.config
    compiled = kept_files("compiled")
    if compiled is None or settings.jax_compilation_cache_dir != str(compiled):
        return None
    return kept_files("programs")


def removes_broken(warning: str) -> bool:
    """Whether JAX warns that it cannot read a program that is kept here; those of its name go.

    A process that is killed while it keeps a program leaves a part of it. JAX warns at every use,
    and keeps no other one in its place.
    """
    found = _BROKEN.match(warning)
    place = kept_files("compiled")
    if found is None or place is None:
        return False
    for file in place.glob(f"{glob.escape(found[1])}-*"):
        file.unlink(missing_ok=True)
    return True


def kept_files(kind: str) -> Path | None:
    """The directory of that name in the user's cache; None where nothing is to be kept."""
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache:
        return None
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        place = base / "specjax" / kind
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None
    return place
