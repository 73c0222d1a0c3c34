"""The machine as text, and how busy it is.

A value that holds on one kind of machine alone is kept under the machine's name.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
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
    told = [value for name, value in _processor_fields().items() if name.startswith(_TOLD)]
    return f"{kind} {platform.machine()} {' '.join(told)} {cores()}"


def processor() -> str:
    """The processor's name, as the system tells it."""
    return _processor_fields().get("model name", platform.processor())


def _processor_fields() -> dict[str, str]:
    """The fields that Linux has for the last core; nothing on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in fields}


def cores() -> int | None:
    """The number of processor cores at hand; None if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class CoreTimes(dict[str, tuple[int, int]]):
    """Nanoseconds that every thread of this process has run, and has waited for a core.

    Linux tells them; elsewhere there are none.
    """

    def __init__(self) -> None:
        for thread in Path("/proc/self/task").glob("*/schedstat"):
            with suppress(OSError, ValueError):  # it has ended, or the system tells nothing
                run, waited, _ = thread.read_text().split()
                self[thread.parent.name] = int(run), int(waited)

    def waited_since(self, earlier: CoreTimes) -> float:
        """Seconds of waiting for a core per second of running, over the threads of both moments.

        Where no other process wants the cores it is near 0; with as many as cores, 1 or more.
        """
        both = self.keys() & earlier.keys()
        run, waited = (sum(self[t][k] - earlier[t][k] for t in both) for k in (0, 1))
        return waited / max(run, 1)
