"""The acceptance rules: which drafted tokens the target keeps, and the one token that it adds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key

from pallas_kernels.row_sums import row_sum
from specjax.speculation import trees
from specjax.speculation.sampling import draw


def matching_chain(
    proposed: Int32[Array, "B N"], drafted: Int32[Array, " B"], own: Int32[Array, "B N+1"]
) -> Int32[Array, " B"]:
    """Keeps drafts while they are the target's own tokens (QSpec section 3.1).

    Args:
      proposed: int32[B, N].
      drafted: int32[B], leading proposals that count.
      own: int32[B, N + 1], the target's token after the last one and after each draft: its greedy
        choice or its draw.

    Returns:
      int32[B], drafts that are kept. The row's next tokens are that many of `own` and one more.
    """
    return _leading((own[:, :-1] == proposed) & counted(proposed, drafted))


def rejection_sample(
    keys: Key[Array, " B"],
    proposed: Int32[Array, "B N"],
    drafted: Int32[Array, " B"],
    draft: Float32[Array, "B N V"],
    target: Float32[Array, "B N+1 V"],
) -> tuple[Int32[Array, " B"], Int32[Array, "B N+1"]]:
    """Speculative sampling: every emitted token has exactly the target's distribution.

    Draft d is kept with probability min(1, target(d) / draft(d)). The first rejected draft is
    replaced by a draw from max(target - draft, 0), normalized (Leviathan et al. 2023, algorithm 1).

    Args:
      keys: one key per row, [B].
      proposed: int32[B, N], drawn from `draft`.
      drafted: int32[B], leading proposals that count.
      draft: f32[B, N, V], the distributions they were drawn from.
      target: f32[B, N + 1, V], the target's distribution after the last token and each draft.

    Returns:
      accepted: int32[B], drafts that are kept, and emitted: int32[B, N + 1], whose first
      accepted + 1 tokens are the row's next ones.
    """
    n = proposed.shape[1]
    last_draw, uniform = _numbers(keys, n)
    chosen = proposed[..., None]
    p = jnp.take_along_axis(target[:, :n], chosen, axis=-1)[..., 0]
    q = jnp.take_along_axis(draft, chosen, axis=-1)[..., 0]
    accepted = _leading((uniform * q < p) & counted(proposed, drafted))
    rejected = accepted < drafted
    q_there = jnp.where(rejected[:, None], _at(draft, accepted), 0)
    residual = _remainder(_at(target, accepted), q_there)
    replacement = draw(last_draw, residual)
    last = jnp.arange(n + 1) == accepted[:, None]
    padded = jnp.pad(proposed, ((0, 0), (0, 1)))
    return accepted, jnp.where(last, replacement[:, None], padded)


def matching_path(
    proposed: Int32[Array, "B N"],
    parents: Int32[Array, "B N"],
    meant: Bool[Array, "B N"],
    own: Int32[Array, "B N+1"],
) -> tuple[Int32[Array, " B"], Int32[Array, "B N"]]:
    """Keeps the longest path of a tree that is the target's own continuation.

    Args:
      proposed, parents: int32[B, N], as in a `Proposal`.
      meant: bool[B, N], the proposals that count.
      own: int32[B, N + 1], as in `matching_chain`.

    Returns:
      accepted: int32[B], drafts that are kept, and nodes: int32[B, N], their numbers, then -1.
    """
    paths = trees.ancestors(parents)
    chosen = meant & (proposed == jnp.take_along_axis(own, parents + 1, axis=1))
    others = paths < 0
    along = jnp.take_along_axis(chosen[:, None], jnp.maximum(paths, 0), axis=2) | others
    lengths = jnp.where(jnp.all(along, axis=2), trees.depths(paths) + 1, 0)
    accepted = jnp.max(lengths, axis=1)
    return accepted, _path(paths, jnp.where(accepted > 0, jnp.argmax(lengths, axis=1), -1))


def sample_path(
    keys: Key[Array, " B"],
    proposed: Int32[Array, "B N"],
    parents: Int32[Array, "B N"],
    meant: Bool[Array, "B N"],
    draft: Float32[Array, "B N V"],
    target: Float32[Array, "B N+1 V"],
) -> tuple[Int32[Array, " B"], Int32[Array, "B N"], Int32[Array, "B N+1"]]:
    """Multi-branch rejection: every emitted token has exactly the target's distribution.

    The children of a node are tried one after another. Child d is kept with probability
    min(1, p(d) / q(d)). q is the distribution that d was drawn from. p starts as the target's
    distribution and becomes max(p - q, 0), normalized, after every rejected child. If all are
    rejected, the next token is a draw from p (SpecInfer, Miao et al. 2024). The rule requires only
    that child d was drawn from q. For independent draws q is their common distribution; for draws
    without replacement, what remained of it.

    Args:
      keys: one key per row, [B].
      proposed, parents, meant: as in `matching_path`.
      draft: f32[B, N, V], q of every draft.
      target: f32[B, N + 1, V], the target's distribution after the last token and each draft.

    Returns:
      accepted: int32[B] and nodes: int32[B, N], as `matching_path` does, and emitted:
      int32[B, N + 1], whose first accepted + 1 tokens are the row's next ones.
    """
    rows, n = proposed.shape
    last_draw, uniform = _numbers(keys, n)

    def consider(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns the last node kept, int32[B], and p of its children, f32[B, V], after node i."""
        node, p = state
        token = proposed[:, i, None]
        q = draft[:, i]
        p_token, q_token = (jnp.take_along_axis(x, token, axis=1)[:, 0] for x in (p, q))
        tried = meant[:, i] & (parents[:, i] == node)
        kept = tried & (uniform[:, i] * q_token < p_token)
        left = _remainder(p, q)
        left = left / row_sum(left)
        p = jnp.where(kept[:, None], target[:, i + 1], jnp.where(tried[:, None], left, p))
        return jnp.where(kept, i, node), p

    start = jnp.full(rows, -1, jnp.int32), target[:, 0]
    node, p = lax.fori_loop(0, n, consider, start)
    nodes = _path(trees.ancestors(parents), node)
    accepted = jnp.sum(nodes >= 0, axis=1, dtype=jnp.int32)
    emitted = jnp.take_along_axis(proposed, jnp.maximum(nodes, 0), axis=1)
    emitted = jnp.pad(emitted, ((0, 0), (0, 1)))
    last = jnp.arange(n + 1) == accepted[:, None]
    return accepted, nodes, jnp.where(last, draw(last_draw, p)[:, None], emitted)


def _numbers(keys: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Random numbers in [0, 1): two for the target's own draw, f32[B, 2], and one per draft,
    f32[B, n]. Each is the same for every n, which is the batch's: a row does not depend on others.
    """
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2 + n,)))(keys)
    return uniform[:, :2], uniform[:, 2:]


def _path(paths: jax.Array, node: jax.Array) -> jax.Array:
    """Returns paths[b, node[b]]; node -1 has an empty path. [B, N, D], [B] -> [B, D]."""
    path = jnp.take_along_axis(paths, jnp.maximum(node, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(node[:, None] >= 0, path, -1)


def _remainder(p: jax.Array, q: jax.Array) -> jax.Array:
    """Unnormalized max(p - q, 0). f32[B, V]."""
    remainder = jnp.maximum(p - q, 0)
    # Equal distributions leave nothing: a rejection there comes from rounding, and p is right.
    return jnp.where(jnp.any(remainder > 0, axis=-1, keepdims=True), remainder, p)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[b, index[b]], zeros past the end. [B, N, …] -> [B, …]."""
    padded = jnp.pad(values, ((0, 0), (0, 1), *((0, 0),) * (values.ndim - 2)))
    found: jax.Array = jax.vmap(lambda row, i: row[i])(padded, index)
    return found


def counted(proposed: jax.Array, drafted: jax.Array) -> jax.Array:
    """Returns which proposals count, bool[B, N]."""
    return jnp.arange(proposed.shape[1]) < drafted[:, None]


def _leading(kept: jax.Array) -> jax.Array:
    """Counts the leading true entries. bool[B, N] -> int32[B]."""
    return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1)
