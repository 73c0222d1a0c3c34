"""Checks which GPU a program is traced for."""

from __future__ import annotations

import jax

_HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def is_hopper() -> bool:
    """Whether the current trace targets a GPU of compute capability 9.0.

    The target is the device of the abstract mesh in use (ahead-of-time compilation), else the
    process's first GPU. Returns False without either.
    """
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        return any(name in target.device_kind.split() for name in _HOPPER)
    try:
        return bool(jax.devices("cuda")[0].compute_capability == "9.0")
    except RuntimeError:
        return False
