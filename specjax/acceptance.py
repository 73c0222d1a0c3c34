"""Which drafted tokens the target keeps, and the one token that it adds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.sampling import draw, greedy


def greedy_match(drafted: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keeps drafts while they are the target's own greedy choice (QSpec section 3.1).

    Args:
      drafted: int32[B, N].
      logits: f32[B, N + 1, V], the target's after the last token and after each draft.

    Returns:
      accepted: int32[B], how many drafts are kept, and emitted: int32[B, N + 1], whose first
      accepted + 1 tokens are the row's next ones.
    """
    emitted = greedy(logits)
    return _leading(emitted[:, :-1] == drafted), emitted


def rejection_sample(
    keys: jax.Array, drafted: jax.Array, draft: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Speculative sampling: every emitted token has exactly the target's distribution.

    Draft d is kept with probability min(1, target(d) / draft(d)); the first one that is not is
    replaced by a draw from max(target - draft, 0), normalized (Leviathan et al. 2023, algorithm 1).

    Args:
      keys: one key per row, [B].
      drafted: int32[B, N], drawn from `draft`.
      draft: f32[B, N, V], the distributions they were drawn from.
      target: f32[B, N + 1, V], the target's after the last token and after each draft.

    Returns:
      accepted: int32[B] and emitted: int32[B, N + 1], as `greedy_match` does.
    """
    n = drafted.shape[1]
    keys = jax.vmap(jax.random.split)(keys)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (n,)))(keys[:, 0])
    chosen = drafted[..., None]
    p = jnp.take_along_axis(target[:, :n], chosen, axis=-1)[..., 0]
    q = jnp.take_along_axis(draft, chosen, axis=-1)[..., 0]
    accepted = _leading(uniform * q < p)
    replacement = draw(keys[:, 1], _residual(draft, target, accepted))
    last = jnp.arange(n + 1) == accepted[:, None]
    padded = jnp.pad(drafted, ((0, 0), (0, 1)))
    return accepted, jnp.where(last, replacement[:, None], padded)


def _residual(draft: jax.Array, target: jax.Array, accepted: jax.Array) -> jax.Array:
    """Unnormalized max(target - draft, 0) where drafting ended. -> f32[B, V]."""
    draft = jnp.pad(draft, ((0, 0), (0, 1), (0, 0)))  # nothing was drafted after the last one
    index = accepted[:, None, None]
    p = jnp.take_along_axis(target, index, axis=1)[:, 0]
    q = jnp.take_along_axis(draft, index, axis=1)[:, 0]
    residual = jnp.maximum(p - q, 0)
    # Equal distributions leave no residual; a rejection there is rounding, and p is right.
    return jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, p)


def _leading(kept: jax.Array) -> jax.Array:
    """How many leading entries are true. bool[B, N] -> int32[B]."""
    return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1)
