"""Where a measurement was made: the machine, the versions, and the commit of the code."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from specjax.files.machine import cores, processor
from specjax.version import __version__


def environment() -> dict[str, Any]:
    """Device, processor, cores, versions and commit, as JSON can hold them."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "specjax": __version__,
        "commit": commit(),
    }


@cache
def commit() -> str | None:
    """The commit of this code, with "-dirty" where there are changes; None outside a repository.

    It stays what it was when it was first asked for: a long run names the code that it began with.
    """
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None  # an environment inside another repository
    return _git(here.parent, "describe", "--always", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a command of git; None where it fails."""
    command = ("git", "--no-optional-locks", *arguments)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
