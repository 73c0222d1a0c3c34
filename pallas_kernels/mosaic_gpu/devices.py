"""Which GPU a program is traced for."""

from __future__ import annotations

import jax

_HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def is_hopper() -> bool:
    """Whether what is traced now is for GPUs of compute capability 9.0.

    The target is the abstract mesh's device where one is in use (ahead-of-time compilation), else
    the process's first GPU; False where there is neither.
    """
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        return any(name in target.device_kind.split() for name in _HOPPER)
    try:
        return bool(jax.devices("cuda")[0].compute_capability == "9.0")
    except RuntimeError:
        return False
