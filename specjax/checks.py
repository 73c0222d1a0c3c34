"""Checks of single values, shared by several rooms."""

from __future__ import annotations

import operator
from typing import Any


def check_integer(name: str, value: Any) -> int:
    """Returns `value` as an int; accepts NumPy integers. Raises ValueError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
