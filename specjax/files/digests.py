"""Names arrays by their contents, so that a resumed run recognizes its inputs."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from pallas_kernels.formats import is_format
from pallas_kernels.interleave import by_rows


def digest(*trees: Any) -> str:
    """Twelve hexadecimal digits that identify pytrees by structure, static fields and arrays.

    Weights are hashed row by row, so their order in memory on this machine makes no difference.
    """
    trees = jax.tree.map(
        lambda leaf: by_rows(leaf) if is_format(leaf) else leaf, trees, is_leaf=is_format
    )
    found = hashlib.sha256(str(jax.tree.structure(trees)).encode())
    for leaf in jax.tree.leaves(trees):
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:12]
