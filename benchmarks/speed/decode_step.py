"""Times one decode step of a model of a billion parameters, or of a given one, and its parts.

The model has Llama-3.2-1B's shape and random weights. `--model` names another one, which is timed
as it is stored and in bfloat16. A step is one forward pass for `new_tokens` tokens per row (1:
plain decoding; more: a verification) and the choice of the next tokens. "matmuls" and "attention"
are the same calls with the same operands alone. Then prompts are read, with every token's logits.

    python -m benchmarks.speed.decode_step --json OUT [--batch 1 8] [--context 128 2048]
        [--cache-bits 16] [--model smollm2] [--peers PYTHON]

`--peers` names the Python of an environment in which llama.cpp and OpenVINO are installed, as
`benchmarks/peers/` describes. They measure each case right after specjax: llama.cpp with 8-bit
activations, OpenVINO with 8-bit ones and with 16-bit ones. They have random weights too, and caches
of 16 bits: they do not go with `--model`, and lines with other caches have no peer.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import specjax
from benchmarks import peers
from benchmarks.support import common
from benchmarks.support.random_layers import random_int4, random_layers
from pallas_kernels.attention import attention
from pallas_kernels.formats import Bfloat16Weight, Quantized
from pallas_kernels.weights import Weight
from specjax.model.config import ModelConfig
from specjax.model.kv_cache import KVCache
from specjax.model.layers import Layer, Linear, over_layers
from specjax.model.params import Params, prepack
from specjax.model.transformer import forward, linear, linears
from specjax.speculation.sampling import greedy

CONFIG = ModelConfig(**peers.SHAPE, tie_word_embeddings=False, dtype="bfloat16")
STEPS, ROUNDS = peers.STEPS, peers.ROUNDS
PEERS = ("llama_cpp", "openvino")


def random_params(head: str) -> Params:
    """Random 4-bit layers, a 16-bit embedding, and a head of 4 or 16 bits."""
    rng = np.random.default_rng(0)

    def wide(n: int, k: int) -> Weight:
        row = jnp.asarray(rng.normal(size=(1, k)) * 0.02, jnp.bfloat16).view(jnp.uint16)
        return Bfloat16Weight(jnp.tile(row, (n, 1)))

    layers = random_layers(rng, CONFIG)
    shape = (CONFIG.vocab_size, CONFIG.hidden_size)
    lm_head = Linear(random_int4(rng, *shape) if head == "int4" else wide(*shape))
    norm = jnp.ones(CONFIG.hidden_size, jnp.bfloat16)
    return prepack(Params(wide(*shape), layers, norm, lm_head, CONFIG))


@partial(jax.jit, static_argnames=("new_tokens", "activation", "steps"), donate_argnames="cache")
def whole(
    params: Params, cache: KVCache, *, new_tokens: int, activation: str, steps: int = STEPS
) -> KVCache:
    """Decode steps, or verifications of `new_tokens` tokens. The context does not grow."""
    rows = cache.lengths.shape[0]

    def step(_: int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        tokens, cache = carry
        # No token is below 0, but the compiler does not know this. It must not move the work for a
        # position, such as its sines, out of the loop.
        lengths = cache.lengths + jnp.minimum(tokens[:, 0], 0)
        cache = cache.with_lengths(lengths)
        positions = lengths[:, None] + jnp.arange(new_tokens)
        logits, cache = forward(params, tokens, positions, cache, activation=activation)
        return greedy(logits), cache

    tokens = jnp.ones((rows, new_tokens), jnp.int32)
    return lax.fori_loop(0, steps, step, (tokens, cache))[1]


@partial(jax.jit, static_argnames=("rows", "activation"))
def matmuls(params: Params, *, rows: int, activation: str) -> jax.Array:
    """The matrix products of STEPS passes. Each waits for the one before."""
    config = params.config

    def after(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + (0 * y[:1, :1]).astype(x.dtype)

    def products(layer: Layer, _: Any, x: jax.Array) -> jax.Array:
        x = after(x, linears(x, (layer.q, layer.k, layer.v), activation)[2])
        x = after(x, linear(x, layer.o, activation))
        x = after(x, linears(x, (layer.gate, layer.up), activation)[1])
        wide = jnp.tile(x, (1, -(-config.intermediate_size // config.hidden_size)))
        wide = wide[:, : config.intermediate_size]
        return after(x, linear(wide, layer.down, activation))

    def step(_: int, x: jax.Array) -> jax.Array:
        x = over_layers(params.layers, tuple(range(config.num_layers)), products, x)
        return after(x, linear(x, params.head, activation))

    x = jnp.ones((rows, config.hidden_size), jnp.bfloat16)
    return lax.fori_loop(0, STEPS, step, x)


@partial(jax.jit, static_argnames=("config", "new_tokens"))
def attentions(cache: KVCache, *, config: ModelConfig, new_tokens: int) -> jax.Array:
    """The attention of STEPS passes."""
    rows = cache.lengths.shape[0]
    positions = cache.lengths[:, None] + jnp.arange(new_tokens)

    def step(_: int, q: jax.Array) -> jax.Array:
        for layer in range(config.num_layers):
            mixed = attention(
                q, cache.keys, cache.values, cache.lengths, positions, None, layer,
                window=None, head_scale=config.head_dim**-0.5,
            )  # fmt: skip
            q = q + (0 * mixed).astype(q.dtype)
        return q

    shape = (rows, new_tokens, config.num_heads, config.head_dim)
    return lax.fori_loop(0, STEPS, step, jnp.ones(shape, jnp.bfloat16))


def activations(params: Params) -> tuple[str, ...]:
    """The activations that the layers' products may have."""
    return ("a16", "a8") if isinstance(params.layers[0].q.weight, Quantized) else ("a16",)


def seconds(call: Callable[[], object], steps: int = STEPS) -> float:
    """Median seconds per step."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times[1:])


def measure(
    params: Params, batch: int, context: int, cache_bits: int, new_tokens: int, activation: str
) -> dict[str, Any]:
    """One line of the table."""
    config = params.config
    cache = KVCache.create(config, batch, context + new_tokens, cache_bits)
    cache = cache.with_lengths(jnp.full(batch, context, jnp.int32))
    parts = {
        "matmuls": seconds(lambda: matmuls(params, rows=batch * new_tokens, activation=activation)),
        "attention": seconds(lambda: attentions(cache, config=config, new_tokens=new_tokens)),
    }
    step = step_seconds(params, cache, new_tokens, activation, STEPS)
    return {
        **case_of(params, activation), "batch": batch, "context": context,
        "cache_bits": cache_bits, "new_tokens": new_tokens,
        "step_ms": 1e3 * step, "matmuls_ms": 1e3 * parts["matmuls"],
        "attention_ms": 1e3 * parts["attention"], "rest_ms": 1e3 * (step - sum(parts.values())),
        "tokens_per_second": batch * new_tokens / step,
    }  # fmt: skip


def read(params: Params, length: int, activation: str) -> dict[str, Any]:
    """One line: a prompt is read, with the logits of every token."""
    step = step_seconds(params, KVCache.create(params.config, 1, length), length, activation, 1)
    return {
        **case_of(params, activation), "batch": 1, "context": 0, "new_tokens": length,
        "step_ms": 1e3 * step, "tokens_per_second": length / step,
    }  # fmt: skip


def step_seconds(
    params: Params, cache: KVCache, new_tokens: int, activation: str, steps: int
) -> float:
    """Seconds of one step of a whole model."""
    kept = [cache]  # each call consumes the cache and returns it

    def run() -> KVCache:
        kept[0] = whole(params, kept[0], new_tokens=new_tokens, activation=activation, steps=steps)
        return kept[0]

    return seconds(run, steps)


def case_of(params: Params, activation: str) -> dict[str, Any]:
    """The fields that all lines of a model have."""
    return {
        "engine": "specjax", "layers": type(params.layers[0].q.weight).__name__,
        "head": type(params.head.weight).__name__, "activation": activation,
    }  # fmt: skip


def measure_peers(python: str, case: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of the peers in the environment of `python`. Prints which peers it lacks."""
    lines = []
    for name in PEERS:
        module = ["-m", f"benchmarks.peers.{name}"]
        run = subprocess.run(
            [python, *module, *case], cwd=common.ROOT, capture_output=True, text=True
        )
        lines += [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        if run.returncode:
            reason = run.stderr.strip().splitlines()[-1:]
            print(f"{name} was not measured: {''.join(reason)}", file=sys.stderr)
    return lines


def compare(lines: list[dict[str, Any]]) -> None:
    """Adds to each of our lines its tokens per second over the best peer's in the same case: of
    all, and of those whose activations have as many bits. The peers' caches have 16 bits."""
    theirs = [line for line in lines if line["engine"] != "specjax"]
    ours = [line for line in lines if line["engine"] == "specjax"]
    for line in (line for line in ours if line.get("cache_bits", 16) == 16):
        equal = [peer for peer in theirs if peer["new_tokens"] == line["new_tokens"]]
        same = [peer for peer in equal if peer["activation"] == line["activation"]]
        for name, others in (("over_best_peer", equal), ("over_best_same_bits", same)):
            if others:
                best = max(peer["tokens_per_second"] for peer in others)
                line[name] = line["tokens_per_second"] / best


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 2048])
    parser.add_argument("--cache-bits", nargs="+", type=int, default=[16])
    parser.add_argument("--new-tokens", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--read", nargs="+", type=int, default=[512], help="tokens of prompts")
    heads = "int4", "bfloat16"
    parser.add_argument("--heads", nargs="+", choices=heads, default=heads)
    parser.add_argument("--model", help="what specjax.load reads, instead of random weights")
    parser.add_argument("--peers", metavar="PYTHON", help="Python of the peers' environment")
    options = parser.parse_args()
    if options.model and options.peers:
        raise ValueError(f"--model must be left out beside --peers, got {options.model!r}")
    if options.model is None:
        models = [random_params(head) for head in options.heads]
    else:
        params = specjax.load(options.model)
        models = [params, specjax.dequantize(params, "bfloat16")]
    lines = []
    for batch, context in itertools.product(options.batch, options.context):
        case = [
            measure(params, batch, context, cache_bits, new_tokens, activation)
            for params in models
            for cache_bits in options.cache_bits
            for new_tokens in options.new_tokens
            for activation in activations(params)
        ]
        if options.peers:
            case += measure_peers(options.peers, ["--batch", str(batch), "--context", str(context)])
            compare(case)
        print(common.table(case, list(case[0])), flush=True)
        lines += case
    for length in options.read:
        case = [read(params, length, each) for params in models for each in activations(params)]
        if options.peers:
            case += measure_peers(options.peers, ["--batch", "--read", str(length)])
            compare(case)
        print(common.table(case, list(case[0])), flush=True)
        lines += case
    common.write(options.json, lines)


if __name__ == "__main__":
    main()
