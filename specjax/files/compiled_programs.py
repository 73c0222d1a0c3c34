"""Compiled programs are kept on disk, so that a new process does not wait for them again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax


def keep_compiled_programs() -> None:
    """Keeps what JAX compiles in the user's cache directory.

    Nothing changes where JAX already has a place (JAX_COMPILATION_CACHE_DIR), is told to keep
    nothing (JAX_ENABLE_COMPILATION_CACHE=false), or where the directory cannot be made.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        place = base / "specjax" / "compiled"
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return
    settings.update("jax_compilation_cache_dir", str(place))
    # A decode is a dozen programs, most of which compile within a tenth of a second.
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.02)
