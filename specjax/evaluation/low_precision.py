"""Plain greedy decoding with low-precision activations throughout: QSpec's W4A8 and W4A4.

It is what QSpec's drafts would write if nobody verified them: the prompt, too, is read so. For
comparison alone; `specjax.decode` always verifies with 16-bit activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.batching import CHUNK, Completion
from specjax.decoding import begin
from specjax.drafting import Autoregressive
from specjax.kv_cache import KVCache
from specjax.params import Params
from specjax.prompts import check_limits, normalize_prompt
from specjax.rounds import step
from specjax.state import DecodeState, Stats
from specjax.transformer import prefill


def complete_at(
    params: Params,
    prompts: Sequence[Sequence[int]],
    activation: str,
    *,
    rows: int = 8,
    max_new_tokens: int = 64,
    cache_bits: int = 16,
) -> Iterator[tuple[int, Completion]]:
    """As `specjax.batching.complete` with `Autoregressive()`, at an activation precision.

    A batch of `rows` prompts is decoded until all of them have ended, the shortest prompts first.
    """
    jobs = []
    for index, prompt in enumerate(prompts):
        try:
            normalize_prompt(list(prompt), None, params.config)
            check_limits(params.config, len(prompt), max_new_tokens, 0, None)
            jobs.append(index)
        except ValueError as error:
            yield index, Completion(np.asarray(prompt), _row(Stats.zeros(1), 0), error=str(error))
    jobs.sort(key=lambda index: len(prompts[index]))
    for first in range(0, len(jobs), rows):
        chosen = jobs[first : first + rows]
        padded = [prompts[index] for index in chosen] + [prompts[chosen[0]]] * (rows - len(chosen))
        width = -(-max(map(len, padded)) // CHUNK) * CHUNK
        tokens = np.zeros((rows, width), np.int32)
        for row, prompt in enumerate(padded):
            tokens[row, : len(prompt)] = prompt
        lengths = jnp.array([len(prompt) for prompt in padded])
        state = _decode(params, tokens, lengths, activation, max_new_tokens, cache_bits)
        for row, index in enumerate(chosen):
            written = np.asarray(state.tokens[row, : int(state.lengths[row])])
            yield index, Completion(written, _row(state.stats, row))


@partial(jax.jit, static_argnames=("activation", "max_new_tokens", "cache_bits"))
def _decode(
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    activation: str,
    max_new_tokens: int,
    cache_bits: int,
) -> DecodeState:
    rows, width = tokens.shape
    cache = KVCache.create(params.config, rows, width + max_new_tokens, cache_bits)
    cache = prefill(params, tokens[:, :-1], cache, activation)
    state = begin(
        params, cache, tokens=tokens, lengths=lengths, drafter=Autoregressive(), keys=None,
        sampling=None, max_new_tokens=max_new_tokens, stop_tokens=params.config.stop_tokens,
    )  # fmt: skip
    return lax.while_loop(
        lambda state: ~jnp.all(state.finished),
        lambda state: step(params, state, Autoregressive(), activation)[0],
        state,
    )


def _row(stats: Stats, row: int) -> Stats:
    return jax.tree.map(lambda counts: np.asarray(counts[row]), stats)
