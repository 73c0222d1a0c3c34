"""Log-probabilities of new tokens under the model's own distribution."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.row_sums import row_max, row_sum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities of new tokens, and the k most probable tokens at each place.

    They are those of the model's own distribution: the log-softmax of its logits, before
    temperature, penalties and whatever else `Sampling` does. On CPUs they have the same bits
    whatever the drafter and whatever shares the batch. Index i is the i-th new token.

    tokens: f32[B, max_new_tokens], of the tokens of the output, zeros behind its end.
    top_tokens: int32[B, max_new_tokens, k], the most probable tokens, the most probable first, of
        equal ones the lower id; zeros behind the end.
    top_logprobs: f32[B, max_new_tokens, k], theirs.

    In a `Completion`, a `Generation` and a `Round` there is no axis B, and the arrays end with the
    tokens.
    """

    tokens: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array

    @classmethod
    def zeros(cls, rows: int, length: int, k: int) -> Logprobs:
        return cls(
            tokens=jnp.zeros((rows, length)),
            top_tokens=jnp.zeros((rows, length, k), jnp.int32),
            top_logprobs=jnp.zeros((rows, length, k)),
        )

    @property
    def k(self) -> int:
        """The number of most probable tokens at each place."""
        return self.top_tokens.shape[-1]

    def put(self, places: Int32[Array, "B N"], others: Logprobs) -> Logprobs:
        """Returns these with N others per row at `places`; those outside are dropped."""
        rows = jnp.arange(places.shape[0])[:, None]
        together: Logprobs = jax.tree.map(
            lambda whole, part: whole.at[rows, places].set(part, mode="drop"), self, others
        )
        return together


def score_emitted(
    logits: Float32[Array, "B N V"], emitted: Int32[Array, "B N"], k: int
) -> Logprobs:
    """The log-probabilities of tokens under the logits behind each of them."""
    most = row_max(logits)
    total = jnp.log(row_sum(jnp.exp(logits - most)))
    given = jnp.take_along_axis(logits, emitted[..., None], axis=-1)
    # Logits are ranked, not their rounded differences; 0 and -0 are equal.
    ranked = jnp.where(logits == 0, 0.0, logits).reshape(-1, logits.shape[-1])
    top = lax.top_k(ranked, k)[1].reshape(*emitted.shape, k)
    top_logits = jnp.take_along_axis(logits, top, axis=-1)
    return Logprobs((given - most - total)[..., 0], top, top_logits - most - total)
