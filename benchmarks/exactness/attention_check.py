"""Checks attention on the machine's accelerator: numerics, invariance in T, and speed.

`benchmarks.gpu_check` runs it.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.products import time_chain
from benchmarks.kernels.rates import beyond_caches, device_name, rates
from benchmarks.support.checks import tried
from benchmarks.support.common import table
from pallas_kernels.attention import BLOCK, IMPLEMENTATIONS, attention
from pallas_kernels.cache_entries import CACHE_BITS, Entries, quantize_entries, read_block
from pallas_kernels.new_entries import rotate_and_write
from pallas_kernels.rope import rotate

HEADS, KV_HEADS = 32, 8  # Llama-3-8B's, of 128 features
LENGTHS = (0, 127, 511, 1000)  # of the context: at the edges of blocks and inside
SLOTS, TOKENS = 1280, 40
SIGHTS = ((False, None), (True, None), (False, 300), (True, 20))  # a tree's mask; window
TIMED = {"bits": (16, 4), "rows": (1, 8), "context": (1024, 16384), "tokens": (1, 8)}
Lines = list[dict[str, Any]]


def numerics(implementations: list[str], seed: int) -> Lines:
    """One line per implementation, cache, width of a head and what is visible."""
    rng = np.random.default_rng(seed)
    names = [name for name in implementations if name in IMPLEMENTATIONS]
    lines = []
    for name, bits, e, (masked, window) in product(names, CACHE_BITS, (64, 128), SIGHTS):
        case = {"implementation": name, "cache_bits": bits, "e": e, "mask": masked}
        result = tried(partial(_check, name, bits, e, masked, window, rng))
        lines.append({"check": "attention", **case, "window": window, **result})
    return lines


def entries(seed: int) -> Lines:
    """One line per width of a head and number of new tokens: their queries, keys and values."""
    rng = np.random.default_rng(seed)
    return [
        {"check": "entries", "e": e, "tokens": t, **tried(partial(_check_entries, t, e, rng))}
        for t, e in product((1, 5), (64, 128))
    ]


def _check_entries(t: int, e: int, rng: np.random.Generator) -> dict[str, Any]:
    """Compares rotated queries and written entries with float32, and the rest of the cache.

    Rounding to bfloat16 is off by at most 2^-8 of the largest value, and so is a rotation whose
    multiplication and addition are fused.
    """
    b, lengths = len(LENGTHS), jnp.asarray(LENGTHS, jnp.int32)
    q, k, v = (jnp.asarray(rng.normal(size=(b, t, n, e)), jnp.float32) for n in (8, 2, 2))
    angles = rng.uniform(-10, 10, (b, t, e // 2))
    rope = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    cached = _entries(rng, (b, 3, SLOTS, 2, e), 16), _entries(rng, (b, 3, SLOTS, 2, e), 16)
    queries, written = rotate_and_write(q, k, v, rope, cached, lengths, 1, jnp.bfloat16)
    new = np.arange(b)[:, None], 1, np.asarray(lengths)[:, None] + np.arange(t)
    found = [queries, *(jax.lax.bitcast_convert_type(part[new], jnp.bfloat16) for part in written)]
    expected = [rotate(q, *rope), rotate(k, *rope), v]
    error = max(
        float(jnp.abs(own.astype(jnp.float32) - each).max() / jnp.abs(each).max())
        for own, each in zip(found, expected, strict=True)
    )
    untouched = all(
        bool((own.at[new].set(0) == old.at[new].set(0)).all())
        for own, old in zip(written, cached, strict=True)
    )
    return {
        "error_of_bound": error / 2.0**-8, "untouched": untouched,
        "passed": error <= 2.0**-8 and untouched,
    }  # fmt: skip


def _check(
    implementation: str, bits: int, e: int, masked: bool, window: int | None,
    rng: np.random.Generator,
) -> dict[str, Any]:  # fmt: skip
    """Compares attention with float64 and, without a mask, each token with the same token alone.

    Weights rounded to bfloat16 have a relative error of at most 2^-8, so the mean of the values is
    off by at most 2^-8 times the largest value. The rest of the bound covers the float32 sums.
    """
    b, lengths = len(LENGTHS), jnp.asarray(LENGTHS, jnp.int32)
    queries = jnp.asarray(rng.normal(size=(b, TOKENS, 8, e)) * 2, jnp.bfloat16)
    keys, values = (_entries(rng, (b, SLOTS, 2, e), bits) for _ in range(2))
    paths = _tree(rng) if masked else None
    mask, depths, shown = None, np.arange(TOKENS), None
    if paths is not None:
        mask = (paths[:, :, None] == np.arange(TOKENS)).any(1)
        depths = (paths >= 0).sum(1) - 1
        shown = jnp.broadcast_to(jnp.asarray(paths, jnp.int32), (b, TOKENS, TOKENS))
    positions = lengths[:, None] + jnp.asarray(depths, jnp.int32)
    run = partial(attention, window=window, head_scale=e**-0.5, implementation=implementation)
    y = np.asarray(run(queries, keys, values, lengths, positions, shown))
    expected = _exact(queries, keys, values, positions, mask, window)
    bound = (2.0**-8 + 2.0**-14) * np.abs(_numbers(values)).max()
    worst = float((np.abs(y - expected) / bound).max())
    differ = []
    for token in range(TOKENS if mask is None else 0):
        one = slice(token, token + 1)
        alone = run(queries[:, one], keys, values, lengths + token, positions[:, one], None)
        if (np.asarray(alone)[:, 0].view(np.int32) != y[:, token].view(np.int32)).any():
            differ.append(token)
    passed = worst <= 1 and not differ
    return {"error_of_bound": worst, "tokens_that_differ": differ, "passed": passed}


def _entries(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> Entries:
    numbers = jax.random.normal(jax.random.key(rng.integers(2**31)), shape, jnp.bfloat16)
    if bits == 16:
        return jax.lax.bitcast_convert_type(numbers, jnp.uint16)
    return quantize_entries(numbers, bits)


def _numbers(entries: Entries) -> np.ndarray:
    """The values of the entries, f64[B, S, K, E]."""
    b, slots = entries.shape[:2]
    layered = jax.tree.map(lambda part: part[:, None], entries)
    rows = [read_block(layered, (row, 0), 0, slots) for row in range(b)]
    return np.asarray(jnp.stack(rows), np.float64)


def _tree(rng: np.random.Generator) -> np.ndarray:
    """A random tree: per token the path to it, itself last, padded with -1. int[T, T]."""
    paths = np.full((TOKENS, TOKENS), -1)
    for token in range(TOKENS):
        path = paths[rng.integers(0, token)] if token else paths[0]
        depth = (path >= 0).sum()
        paths[token, : depth + 1] = [*path[:depth], token]
    return paths


def _exact(
    queries: jax.Array,
    keys: Entries,
    values: Entries,
    positions: jax.Array,
    mask: np.ndarray | None,
    window: int | None,
) -> np.ndarray:
    """The softmax in float64."""
    q, k, v = np.asarray(queries, np.float64), _numbers(keys), _numbers(values)
    b, t, h, e = q.shape
    new = np.arange(SLOTS) - np.asarray(LENGTHS)[:, None]  # [B, S]
    at = np.where(new < 0, np.arange(SLOTS), 0)
    inside = (new >= 0) & (new < t)
    at[inside] = np.asarray(positions).reshape(-1)[
        (np.arange(b)[:, None] * t + new.clip(0, t - 1))[inside]
    ]
    shown = np.tril(np.ones((t, t), bool)) if mask is None else mask
    seen = (new < 0)[:, None] | (inside[:, None] & shown[:, new.clip(0, t - 1)].swapaxes(0, 1))
    if window is not None:
        seen &= np.asarray(positions)[:, :, None] - at[:, None] < window
    q = q.reshape(b, t, k.shape[2], -1, e)
    scores = np.einsum("btkge,bske->btkgs", q, k) * e**-0.5
    scores = np.where(seen[:, :, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("btkgs,bske->btkge", weights, v).reshape(b, t, h, e)


def speed(implementations: list[str]) -> Lines:
    """One line per implementation, cache and size, beside the time to read the context once."""
    names = [name for name in implementations if name in IMPLEMENTATIONS]
    read = rates()["read"]
    lines = [_time(name, *sizes, read=read) for name, *sizes in product(names, *TIMED.values())]
    print(table(lines, list(lines[0])[1:]), flush=True)
    return lines


def _time(
    implementation: str, bits: int, rows: int, context: int, tokens: int, read: float
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(rows, tokens, HEADS, 128)), jnp.bfloat16)
    first = [_entries(rng, (rows, context + BLOCK, KV_HEADS, 128), bits) for _ in range(2)]
    size = sum(part.nbytes for part in jax.tree.leaves(first))
    count = max(2, beyond_caches() // size + 1)
    caches = [first, *(jax.tree.map(lambda part: part.copy(), first) for _ in range(count - 1))]
    lengths = jnp.full(rows, context, jnp.int32)
    positions = lengths[:, None] + jnp.arange(tokens)

    def attend(queries: jax.Array, cache: list[Entries]) -> jax.Array:
        return attention(
            queries, *cache, lengths, positions, None,
            window=None, head_scale=128**-0.5, implementation=implementation,
        )  # fmt: skip

    took = time_chain(attend, queries, caches)
    limit = size * context / (context + BLOCK) / read
    return {
        "check": "attention speed", "implementation": implementation, "cache_bits": bits,
        "rows": rows, "context": context, "tokens": tokens, "microseconds": took * 1e6,
        "limit_microseconds": limit * 1e6, "fraction": limit / took, "device": device_name(),
    }  # fmt: skip
