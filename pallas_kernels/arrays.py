"""The properties that all weight formats share."""

from __future__ import annotations

import jax

TILE = 16  # rows that stand together: the 32-bit lanes of AVX-512; narrower vectors use a part


class Arrays:
    """Properties of a tree of arrays."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))
