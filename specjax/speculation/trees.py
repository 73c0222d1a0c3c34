"""Token trees: proposals of several continuations at once.

A tree is the array of its nodes' parents, int32[B, N]: parents[b, i] < i, and -1 for a child of
the last token. All functions are small integer arithmetic on whole arrays, inside the compiled
loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32


def from_sequences(
    sequences: Int32[Array, "B C L"], lengths: Int32[Array, "B C"], nodes: int
) -> tuple[Int32[Array, "B {nodes}"], Int32[Array, "B {nodes}"], Int32[Array, " B"]]:
    """Merges candidate continuations into a trie: common beginnings appear once.

    Nodes follow the order of the sequences, and the order of the tokens within a sequence. The cut
    at `nodes` therefore drops the ends of the last sequences first. The tokens must have been
    chosen deterministically: merging drawn tokens would change the distribution they were drawn
    from.

    Args:
      sequences: int32[B, C, L].
      lengths: int32[B, C], valid tokens of each; 0 leaves a sequence out.
      nodes: the most nodes of a tree, N.

    Returns:
      tokens: int32[B, N], parents: int32[B, N] and counts: int32[B], as in a `Proposal`.
      Places from counts[b] on hold token 0 and parent -1.
    """
    b, c, length = sequences.shape
    valid = jnp.arange(length) < lengths[..., None]
    differ = sequences[:, :, None] != sequences[:, None]
    shared = (jnp.cumsum(differ, axis=3) == 0) & valid[:, None]  # [B, C, C, L]
    first = jnp.argmax(shared, axis=2)  # the first sequence that begins with the same tokens
    is_node = valid & (first == jnp.arange(c)[:, None])
    numbers = jnp.cumsum(is_node.reshape(b, -1), axis=1, dtype=jnp.int32).reshape(b, c, length) - 1
    own = jnp.take_along_axis(numbers, first, axis=1)
    parents = jnp.pad(own[:, :, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    places = jnp.where(is_node, numbers, nodes)
    rows = jnp.arange(b)[:, None, None]
    return (
        jnp.zeros((b, nodes), jnp.int32).at[rows, places].set(sequences, mode="drop"),
        jnp.full((b, nodes), -1, jnp.int32).at[rows, places].set(parents, mode="drop"),
        jnp.minimum(jnp.sum(is_node, axis=(1, 2), dtype=jnp.int32), nodes),
    )


def ancestors(parents: Int32[Array, "B N"]) -> Int32[Array, "B N N"]:
    """Returns the path to every node, itself last. int32[B, N] -> int32[B, N, N], padded with -1.

    Entry d is the node at depth d; numbers rise along a path.
    """
    b, n = parents.shape
    rows = jnp.arange(b)

    def extend(node: jax.Array, paths: jax.Array) -> jax.Array:
        """Adds the path of one node: its parent's path, and then the node."""
        parent = parents[:, node]
        above = jnp.where(parent[:, None] >= 0, paths[rows, jnp.maximum(parent, 0)], -1)
        depth = jnp.sum(above >= 0, axis=1, keepdims=True)
        return paths.at[:, node].set(jnp.where(jnp.arange(n) == depth, node, above))

    # A loop, because it compiles fast: parents come before their children.
    paths: jax.Array = lax.fori_loop(0, n, extend, jnp.full((b, n, n), -1, jnp.int32))
    return paths


def depths(paths: Int32[Array, "B N depth"]) -> Int32[Array, "B N"]:
    """Returns the depth of every node, 0 for a child of the last token. `ancestors` -> int32[B,
    N]."""
    return jnp.sum(paths >= 0, axis=2, dtype=jnp.int32) - 1
