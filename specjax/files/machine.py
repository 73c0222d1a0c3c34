"""The machine as text: what holds on one kind of machine alone is kept under its name."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import jax

_TOLD = "model name", "flags", "Features"  # lines of /proc/cpuinfo; the last is an ARM's


@cache
def machine() -> str:
    """The device's kind; for a CPU, its name, its instructions and the number of cores at hand."""
    kind: str = jax.devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return kind
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = (line.partition(":") for line in lines if line.startswith(_TOLD))
    told = {name.strip(): value.strip() for name, _, value in fields}  # the last core's
    return f"{kind} {platform.machine()} {' '.join(told.values())} {cores()}"


def cores() -> int | None:
    """The number of processor cores at hand; None if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
