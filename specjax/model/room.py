"""Whether memory has room for what will be made: asked before, because no answer comes after.

A system that runs out of memory kills the process, or the whole machine stands still. So a model,
a KV cache or a batch that cannot fit is refused by its size, in one sentence that says what would
fit. All estimates are too low rather than too high: what is let through may still fail, and what is
refused would have.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import psutil
from jax.sharding import Mesh

from specjax.model.config import ModelConfig
from specjax.model.sizes import cache_bytes, in_units, most_that_fits, weight_bytes

_FORMATS = {"int8": "int8", "rtn": "int4"}  # methods of `specjax.quantize` and what they make
_UNLIMITED = 2**63
_SMALL = 2**26  # bytes; to ask takes a millisecond
_PAGES = ("inactive_file", "active_file")  # bytes of files in memory, which the system drops


def available() -> int | None:
    """Bytes that new arrays on the default device may take; None if the device does not tell."""
    options: Any = jax.config  # its types do not name the options of every version
    chosen = options.jax_default_device
    device = jax.local_devices(backend=chosen)[0] if isinstance(chosen, str | None) else chosen
    if device.platform == "cpu":
        return _host()
    found = device.memory_stats() or {}
    if "bytes_limit" not in found:
        return None
    return int(found["bytes_limit"] - found.get("bytes_in_use", 0))


def check_weights(
    source: object, config: ModelConfig, needed: int, *, layer_by_layer: bool = True
) -> None:
    """Refuses a model that memory cannot hold.

    Args:
      source: where it comes from, for the message.
      config: the model's.
      needed: bytes of its weights.
      layer_by_layer: whether `specjax convert` could read it so, and quantize it in less memory.

    Raises:
      ValueError: fewer bytes are available than needed.
    """

    def advice(left: int) -> str:
        sizes = {method: weight_bytes(config, kind) for method, kind in _FORMATS.items()}
        fits = [method for method, size in sizes.items() if size <= min(left, needed - 1)]
        if not fits:
            return f"even 4-bit weights take {in_units(min(sizes.values()))}"
        size = in_units(sizes[fits[0]])
        where = "" if layer_by_layer else " of its source"
        return f"specjax convert --quantize {fits[0]}{where} makes {size} of it, which would fit"

    _check(str(source), needed, advice)


def check_cache(
    config: ModelConfig, rows: int, slots: int, bits: int = 16, mesh: Mesh | None = None
) -> None:
    """Refuses a KV cache that memory cannot hold. Raises ValueError."""
    parts = 1 if mesh is None else mesh.size

    def needed(rows: int = rows, slots: int = slots, bits: int = bits) -> int:
        return cache_bytes(config, rows, slots, bits) // parts

    def advice(left: int) -> str:
        fewer = [f"{most} rows" for most in [most_that_fits(left, needed, rows)] if 0 < most < rows]
        smaller = [f"cache_bits={b}" for b in (8, 4) if b < bits and needed(bits=b) <= left]
        shorter = most_that_fits(left, lambda n: needed(slots=max(n, 1)), slots)
        fits = [*fewer, *smaller] or [f"{shorter} slots"]
        return f"{' or '.join(fits)} would fit"

    _check(f"a KV cache of {rows} rows of {slots} slots", needed(), advice)


def check_scoring(
    config: ModelConfig, rows: int, tokens: int, cache_bits: int = 16, mesh: Mesh | None = None
) -> None:
    """Refuses a pass over texts, with the logits of all their tokens. Raises ValueError."""
    parts = 1 if mesh is None else mesh.size

    def needed(rows: int) -> int:
        logits = 4 * rows * tokens * config.vocab_size
        return (cache_bytes(config, max(rows, 1), tokens, cache_bits) + logits) // parts

    def advice(left: int) -> str:
        return f"{most_that_fits(left, needed, rows)} rows would fit"

    _check(f"a pass over {rows} rows of {tokens} tokens", needed(rows), advice)


def _check(what: str, needed: int, advice: Callable[[int], str]) -> None:
    left = available() if needed > _SMALL else None
    if left is not None and needed > left:
        raise ValueError(
            f"{what} needs {in_units(needed)} of memory, and {in_units(max(left, 0))} are "
            f"available: {advice(left)}"
        )


def _host() -> int:
    """Bytes that the machine, the control groups and the limits still leave to this process."""
    swap: int = psutil.swap_memory().free
    spaces = [psutil.virtual_memory().available, *_groups(Path("/"))]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        spaces.append(limit - psutil.Process().memory_info().vms - swap)
    return int(min(spaces)) + swap


def _groups(root: Path) -> Iterator[int]:
    """Bytes left in each control group of this process, of either version, up to the root.

    root: the root of the file system, for tests.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = top / path.lstrip("/")  # in a container the mounted top may be the group itself
        for each in (group, *group.parents):
            yield _left(each, *names)
            if each == top:
                break


def _left(group: Path, limit: str, usage: str, prefix: str) -> int:
    """Bytes left in one group; very many where it has no limit."""
    try:
        most, used = int((group / limit).read_text()), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return most - used + sum(int(stat.get(prefix + name, 0)) for name in _PAGES)
    except (OSError, ValueError):  # no such group here, or "max"
        return _UNLIMITED
