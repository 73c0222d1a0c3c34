"""Names arrays by their contents, so that a resumed run recognizes its inputs."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from specjax.model.params import map_models, stored


def digest(*trees: Any) -> str:
    """Twelve hexadecimal digits that identify pytrees by structure, static fields and arrays.

    Models are hashed as they are stored, so their order in memory on this machine makes no
    difference.
    """
    trees = map_models(stored, trees)
    found = hashlib.sha256(str(jax.tree.structure(trees)).encode())
    for leaf in jax.tree.leaves(trees):
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:12]
