"""Which drafted tokens the target keeps, and the one token that it adds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.sampling import draw, greedy


def greedy_match(
    proposed: jax.Array, drafted: jax.Array, logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keeps drafts while they are the target's own greedy choice (QSpec section 3.1).

    Args:
      proposed: int32[B, N].
      drafted: int32[B], how many of them count.
      logits: f32[B, N + 1, V], the target's after the last token and after each draft.

    Returns:
      accepted: int32[B], how many drafts are kept, and emitted: int32[B, N + 1], whose first
      accepted + 1 tokens are the row's next ones.
    """
    emitted = greedy(logits)
    return _leading((emitted[:, :-1] == proposed) & _meant(proposed, drafted)), emitted


def rejection_sample(
    keys: jax.Array,
    proposed: jax.Array,
    drafted: jax.Array,
    draft: jax.Array | None,
    target: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Speculative sampling: every emitted token has exactly the target's distribution.

    Draft d is kept with probability min(1, target(d) / draft(d)); the first one that is not is
    replaced by a draw from max(target - draft, 0), normalized (Leviathan et al. 2023, algorithm 1).

    Args:
      keys: one key per row, [B].
      proposed: int32[B, N], drawn from `draft`.
      drafted: int32[B], how many of them count.
      draft: f32[B, N, V], the distributions they were drawn from; None: chosen without chance.
      target: f32[B, N + 1, V], the target's after the last token and after each draft.

    Returns:
      accepted: int32[B] and emitted: int32[B, N + 1], as `greedy_match` does.
    """
    n = proposed.shape[1]
    keys = jax.vmap(jax.random.split)(keys)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (n,)))(keys[:, 0])
    chosen = proposed[..., None]
    p = jnp.take_along_axis(target[:, :n], chosen, axis=-1)[..., 0]
    q = 1.0 if draft is None else jnp.take_along_axis(draft, chosen, axis=-1)[..., 0]
    accepted = _leading((uniform * q < p) & _meant(proposed, drafted))
    rejected = accepted < drafted
    residual = _residual(rejected, _at(proposed, accepted), draft, target, accepted)
    replacement = draw(keys[:, 1], residual)
    last = jnp.arange(n + 1) == accepted[:, None]
    padded = jnp.pad(proposed, ((0, 0), (0, 1)))
    return accepted, jnp.where(last, replacement[:, None], padded)


def _residual(
    rejected: jax.Array,
    token: jax.Array,
    draft: jax.Array | None,
    target: jax.Array,
    accepted: jax.Array,
) -> jax.Array:
    """Unnormalized max(target - draft, 0) where drafting ended; target where nothing was rejected.

    rejected: bool[B]; token: int32[B], the rejected one. -> f32[B, V].
    """
    p = _at(target, accepted)
    q = jax.nn.one_hot(token, p.shape[-1]) if draft is None else _at(draft, accepted)
    residual = jnp.maximum(p - jnp.where(rejected[:, None], q, 0), 0)
    # Equal distributions leave no residual; a rejection there is rounding, and p is right.
    return jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, p)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[b, index[b]], zeros past the end. [B, N, …] -> [B, …]."""
    padded = jnp.pad(values, ((0, 0), (0, 1), *((0, 0),) * (values.ndim - 2)))
    return jax.vmap(lambda row, i: row[i])(padded, index)


def _meant(proposed: jax.Array, drafted: jax.Array) -> jax.Array:
    """Which proposals count. -> bool[B, N]."""
    return jnp.arange(proposed.shape[1]) < drafted[:, None]


def _leading(kept: jax.Array) -> jax.Array:
    """How many leading entries are true. bool[B, N] -> int32[B]."""
    return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1)
