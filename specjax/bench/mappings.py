"""Room for compiled programs: Linux limits a process's mappings, and XLA ends in a crash there.

Every compiled program stays mapped. One whose layers are not in a stack takes many of the 65,530
mappings that are usual.
"""

from __future__ import annotations

from pathlib import Path

import jax

from specjax.files import kept_programs

_MAPPINGS = Path("/proc/self/maps")
_LIMIT = Path("/proc/sys/vm/max_map_count")


def forget_programs(share: float = 0.25) -> None:
    """Forgets all compiled programs if they take more than a share of the mappings.

    They are compiled anew, or read from disk, when they are called again. Systems without such a
    limit forget nothing.
    """
    try:
        taken, limit = _MAPPINGS.read_bytes().count(b"\n"), int(_LIMIT.read_text())
    except OSError:
        return
    if taken > share * limit:
        jax.clear_caches()
        kept_programs.forget()
