"""Names for arrays: equal names, equal contents. What was begun with others is not taken up."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np


def digest(*trees: Any) -> str:
    """Twelve hexadecimal digits that stand for pytrees: their structure, static fields, arrays."""
    found = hashlib.sha256(str(jax.tree.structure(trees)).encode())
    for leaf in jax.tree.leaves(trees):
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:12]
