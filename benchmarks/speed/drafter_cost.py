"""Times the drafters without a model in a round of a model of a billion parameters.

The model has Llama-3.2-1B's shape, its 128,256 tokens and random 4-bit weights. Rows have
`--context` tokens in the cache. A whole round (draft, verify, accept, learn) and the drafter's two
parts of it alone take turns, so that a busy machine slows all of them. The minimum of each is
reported.

    python -m benchmarks.speed.drafter_cost --json OUT
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed.decode_step import CONFIG, random_params
from benchmarks.support.common import parser, table, write
from specjax import (
    Autoregressive,
    Combined,
    Datastore,
    Drafter,
    Lookahead,
    NGram,
    Params,
    PromptLookup,
    Retrieval,
    Spectra,
)
from specjax.generation.decoding import begin
from specjax.generation.request import Request
from specjax.generation.rows import Rows
from specjax.model.kv_cache import KVCache
from specjax.speculation.rounds import step
from specjax.speculation.state import DecodeState, Proposal

WORDS = 300  # different tokens in the texts, so that n-grams recur


def main() -> None:
    options = _options()
    params = random_params("int4")
    rng = np.random.default_rng(0)
    corpus = rng.integers(0, WORDS, (options.corpus // 256, 256))
    retrieval = Retrieval(Datastore.create(list(corpus), CONFIG.vocab_size))
    drafters = {
        "plain": Autoregressive(),
        "prompt lookup": PromptLookup(),
        "ANPD": NGram(),
        "Lookahead": Lookahead(),
        "REST": retrieval,
        "CORE": Spectra(),
        "SPECTRA": Combined(Spectra(), retrieval),
    }
    rows = []
    for batch in options.batch:
        for name in options.drafters or drafters:
            rows.append({"drafter": name, **measure(params, drafters[name], batch, options)})
            write(options.json, rows)
    print(table(rows, list(rows[0])))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--drafters", nargs="+", help="names, such as SPECTRA; default: all")
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--context", type=int, default=700)
    add("--corpus", type=int, default=2_000_000, help="tokens of the datastore")
    add("--rounds", type=int, default=20)
    return parse.parse_args()


def measure(params: Params, drafter: Drafter, batch: int, options: Any) -> dict[str, Any]:
    """Milliseconds of a round, and of `propose` and `observe` in it."""
    context, new = options.context, options.rounds * (drafter.draft_length + 1)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, WORDS, (batch, context)), jnp.int32)
    cache = KVCache.create(CONFIG, batch, context + new, 16)
    request = Request.make(params, drafter=drafter, max_new_tokens=new, stop_tokens=())
    lengths = jnp.full(batch, context)
    rows = Rows(tokens, lengths, lengths + new, keys=None, sampling=None)
    state = begin(params, request, cache, rows)
    state = jax.tree.map(jnp.copy, state)  # `step` donates it; a drafter's may be shared

    @jax.jit
    def propose(drafter: Drafter, state: DecodeState) -> tuple[Proposal, Any]:
        proposal, state = drafter.propose(params, state)
        return proposal, state.draft

    observe = jax.jit(lambda drafter, draft, verified: drafter.observe(draft, verified))
    least = {"propose": np.inf, "observe": np.inf, "round": np.inf}
    for _ in range(options.rounds):
        before, (_, draft) = _timed(propose, drafter, state)
        whole, (state, verified) = _timed(step, params, state, drafter)
        after, _ = _timed(observe, drafter, draft, verified)
        times = {"propose": before, "observe": after, "round": whole}
        least = {name: min(least[name], times[name]) for name in least}
    return {
        "batch": batch,
        "draft_length": drafter.draft_length,
        **{f"{name}_ms": 1e3 * seconds for name, seconds in least.items()},
        "share": (least["propose"] + least["observe"]) / least["round"],
    }


def _timed(call: Any, *arguments: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - begun, result


if __name__ == "__main__":
    main()
