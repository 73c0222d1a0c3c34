"""Compares the C++ library's attention with float64, and with itself bit for bit."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu
from pallas_kernels.attention import attention as any_attention
from pallas_kernels.cache_entries import (
    QuantizedEntries,
    dequantize_entries,
    move_entries,
    quantize_entries,
)
from pallas_kernels.cpu.native import instruction_sets

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ library was not built")

SETS = instruction_sets()
BLOCK = 256  # kAttentionBlock in src/common/types.h
CACHES = ("float32", "bfloat16", "8 bits", "4 bits")
OPTIONS = ("window", "sinks", "head_scale")
OPERANDS = ("queries", "keys", "values", "lengths", "positions", "ancestors")

Case = dict[str, Any]
quantized = jax.jit(quantize_entries, static_argnums=1)
moved = jax.jit(move_entries)
dequantized = jax.jit(dequantize_entries)


def make_case(
    b: int, t: int, h: int, k: int, e: int, s: int, lengths: list[int], *,
    cache: str = "float32", mask: str | None = None, window: int | None = None, sinks: int = 0,
    seed: int = 0,
) -> Case:  # fmt: skip
    """Operands of one call. mask: "chain", "tree", or None for a chain without a mask.

    A case describes visibility both as `mask` and as `ancestors`. All arrays are NumPy's, because
    slicing JAX arrays would compile a program for every shape.
    """
    rng = np.random.default_rng(seed)
    q = (rng.normal(size=(b, t, h, e)) * 2).astype(np.float32)
    keys, values = (rng.normal(size=(b, s, k, e)).astype(np.float32) for _ in range(2))
    if cache != "float32":
        q = q.astype(jnp.bfloat16)
    if cache == "bfloat16":
        keys, values = (x.astype(jnp.bfloat16).view(np.uint16) for x in (keys, values))
    if cache in ("8 bits", "4 bits"):
        keys, values = (jax.device_get(quantized(x, int(cache[0]))) for x in (keys, values))
    depth, shown, ancestors = np.arange(t), None, None
    if mask is not None:
        parents = [i - 1 if mask == "chain" or i == 0 else rng.integers(0, i) for i in range(t)]
        ancestors = np.full((t, t), -1)
        for i, parent in enumerate(parents):
            depth[i] = depth[parent] + 1 if i else 0
            ancestors[i, : depth[i]] = ancestors[parent, : depth[i]]
            ancestors[i, depth[i]] = i
        shown = (ancestors[:, :, None] == np.arange(t)).any(1)
        shown = np.broadcast_to(shown, (b, t, t))
        ancestors = np.array([ancestors] * b, np.int32)
    length = np.array(lengths, np.int32)
    return {
        "queries": q, "keys": keys, "values": values,
        "lengths": length,
        "positions": (length[:, None] + depth).astype(np.int32),
        "mask": shown,
        "ancestors": ancestors,
        "window": window, "sinks": sinks, "head_scale": e**-0.5,
    }  # fmt: skip


def run(case: Case, instruction_set: str | None = None, **changes: Any) -> np.ndarray:
    """Runs the C++ attention on a case, with some operands changed."""
    case = case | changes
    operands = operands_of(case)
    options = {name: case[name] for name in OPTIONS}
    return np.asarray(cpu.attention(*operands, **options, instruction_set=instruction_set))


def operands_of(case: Case, last: str = "ancestors") -> tuple[Any, ...]:
    """A case's operands as kernels take them: the cache has an axis of layers, here of one."""
    keys, values = jax.tree.map(lambda part: part[:, None], (case["keys"], case["values"]))
    others = (case[name] for name in ("lengths", "positions", last))
    return case["queries"], keys, values, *others, np.int32(0)


def rounds_weights(case: Case, instruction_set: str | None) -> bool:
    """Whether the softmax's weights are rounded to bfloat16: by products of bfloat16 pairs."""
    e, coded = case["queries"].shape[-1], isinstance(case["keys"], QuantizedEntries)
    pairs = instruction_set in ("avx512_bf16", "avx512_amx")
    whole = e % (64 if coded and case["keys"].bits == 4 else 32) == 0
    return pairs and whole and case["queries"].dtype == jnp.bfloat16


def exact(case: Case, rounded: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and a bound on the error of float32.

    rounded: weights are rounded to bfloat16. Each is off by 2^-9 of itself at most, and so is their
    total.

    A score is a sum of E products, each with a relative error under (E + 2) · 2^-24, or (E + 3) if
    a key is a code times its scale. An error d in all scores changes a weighted mean by at most
    2 d · max |v|. The sums of the mean add an error under (S + few) · 2^-24 · max |v| in the worst
    order. Sums are short (a block, then blocks), so the bound uses one block and 16, for exp2 too.
    """

    def wide(x: np.ndarray | QuantizedEntries) -> np.ndarray:
        if isinstance(x, QuantizedEntries):
            integers = dequantized(dataclasses.replace(x, scales=np.ones_like(x.scales)))
            return np.asarray(integers, np.float64) * x.scales[..., None]
        if x.dtype == np.uint16:
            x = x.view(jnp.bfloat16)
        return np.asarray(x, np.float64)

    q, keys, values = wide(case["queries"]), wide(case["keys"]), wide(case["values"])
    b, t, h, e = q.shape
    group, coded = h // keys.shape[2], isinstance(case["keys"], QuantizedEntries)
    out, bound = np.zeros_like(q), np.zeros_like(q)
    for row in range(b):
        seen = visible(case, row, keys.shape[1])
        for head in range(h):
            k, v = keys[row, :, head // group], values[row, :, head // group]
            for token in range(t):
                slots = np.flatnonzero(seen[token])
                if len(slots) == 0:
                    continue
                products = k[slots] * q[row, token, head] * case["head_scale"]
                scores = products.sum(-1)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[row, token, head] = weights @ v[slots]
                score_error = (e + 2 + coded) * np.abs(products).sum(-1).max()
                bound[row, token, head] = (
                    (2 * score_error + 16 + min(len(slots), BLOCK))
                    * 2.0**-24
                    * np.abs(v[slots]).max()
                )
                if rounded:
                    bound[row, token, head] += 2.0**-8 * (weights @ np.abs(v[slots]))
    return out, bound


def visible(case: Case, row: int, slots: int) -> np.ndarray:
    """The visible slots as `attention` documents them: bool[T, S]."""
    t = case["queries"].shape[1]
    length, positions = int(case["lengths"][row]), np.asarray(case["positions"][row])
    mask = np.tril(np.ones((t, t), bool)) if case["mask"] is None else np.asarray(case["mask"][row])
    seen = np.zeros((t, slots), bool)
    for token in range(t):
        for slot in range(min(slots, length + t)):
            new = slot - length
            at = positions[new] if new >= 0 else slot
            shown = new < 0 or mask[token, new]
            near = case["window"] is None or positions[token] - at < case["window"]
            seen[token, slot] = shown and (near or at < case["sinks"])
    return seen


CASES = {
    "llama-1b": make_case(2, 3, 8, 2, 64, 384, [300, 7], cache="bfloat16"),
    "llama-8b": make_case(1, 1, 4, 1, 128, 640, [600], cache="bfloat16"),
    "float32": make_case(2, 5, 4, 2, 64, 512, [0, 255]),
    "window": make_case(2, 9, 4, 2, 80, 896, [800, 30], cache="bfloat16", window=100),
    "narrow-window": make_case(1, 6, 2, 2, 16, 640, [515], window=3),
    "chain": make_case(2, 9, 4, 4, 96, 384, [256, 100], mask="chain"),
    "tree": make_case(3, 13, 6, 3, 32, 640, [251, 511, 0], mask="tree", cache="bfloat16"),
    "grouped-tree": make_case(2, 21, 14, 2, 64, 512, [250, 100], mask="tree", cache="bfloat16"),
    "tree-window": make_case(2, 13, 4, 2, 24, 640, [250, 500], mask="tree", window=20),
    "sinks": make_case(3, 9, 4, 2, 64, 896, [800, 290, 30], cache="bfloat16", window=100, sinks=4),
    "tree-sinks": make_case(3, 13, 4, 2, 24, 640, [0, 250, 500], mask="tree", window=3, sinks=5),
    "codes-sinks": make_case(2, 3, 4, 2, 64, 640, [600, 40], cache="8 bits", window=40, sinks=64),
    "odd": make_case(2, 4, 3, 1, 5, 128, [17, 80], cache="bfloat16"),
    "one-feature": make_case(1, 2, 2, 1, 1, 128, [9]),
    "wide-head": make_case(1, 2, 2, 1, 256, 384, [300], cache="bfloat16"),
    "prefill": make_case(1, 70, 4, 1, 64, 384, [0], cache="bfloat16"),
    "many-heads": make_case(1, 2, 70, 1, 16, 256, [200]),
    "codes-8": make_case(2, 3, 8, 2, 64, 384, [300, 7], cache="8 bits"),
    "codes-4": make_case(2, 9, 4, 2, 128, 640, [600, 40], cache="4 bits", window=100),
    "codes-8-tree": make_case(2, 21, 14, 2, 96, 512, [250, 100], mask="tree", cache="8 bits"),
    "codes-4-tree": make_case(3, 13, 6, 3, 64, 640, [251, 511, 0], mask="tree", cache="4 bits"),
    "codes-4-narrow": make_case(2, 5, 4, 2, 32, 512, [0, 255], cache="4 bits"),
    "codes-prefill": make_case(1, 70, 4, 1, 64, 384, [0], cache="4 bits"),
    "many-heads-16": make_case(1, 2, 70, 1, 96, 256, [200], cache="bfloat16", window=150),
}


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(1)
def test_agrees_with_float64(name: str, instruction_set: str) -> None:
    case = CASES[name]
    expected, bound = exact(case, rounds_weights(case, instruction_set))
    error = np.abs(run(case, instruction_set) - expected)
    assert (error <= bound).all(), (error / np.maximum(bound, 1e-30)).max()


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("cache", CACHES[1:])
@pytest.mark.covering(1)
def test_a_mean_of_ones_is_one(cache: str, instruction_set: str) -> None:
    """The total is that of the weights that mix, rounded or not."""
    case = make_case(1, 5, 8, 2, 64, 512, [300], cache=cache)
    if cache == "bfloat16":
        ones: Any = np.full_like(case["values"], 0x3F80)
    else:
        ones = quantized(np.ones(case["values"].shape, np.float32), case["values"].bits)
    assert np.abs(run(case, instruction_set, values=ones) - 1).max() <= 2.0**-20


@pytest.mark.parametrize("name", ["llama-1b", "tree-window"])
def test_the_door_takes_it(name: str) -> None:
    case = dict(CASES[name])
    del case["mask"]
    operands = [case.pop(name) for name in OPERANDS]
    np.testing.assert_array_equal(any_attention(*operands, **case), run(CASES[name]))


# --- Invariance: results are compared bit for bit.


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(
    ("cache", "e"),
    [("float32", 40), ("bfloat16", 40), ("bfloat16", 64), ("8 bits", 64), ("4 bits", 64)],
)
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (70, 4)])
@pytest.mark.covering(1)
def test_rows_tokens_and_capacity(
    cache: str, e: int, window: int | None, sinks: int, instruction_set: str
) -> None:
    lengths = [5, 130, 700, 250]
    case = make_case(4, 19, 8, 2, e, 896, lengths, cache=cache, window=window, sinks=sinks)
    whole = run(case, instruction_set)
    for row, slots in enumerate((128, 256, 896, 384)):
        for t in (1, 2, 5, 16, 19):
            part = {name: case[name][row : row + 1, :t] for name in ("queries", "positions")}
            for name in ("keys", "values"):
                part[name] = jax.tree.map(lambda x: x[row : row + 1, :slots], case[name])  # noqa: B023
            alone = run(case, instruction_set, lengths=case["lengths"][row : row + 1], **part)
            same_bits(alone[0], whole[row, :t])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(
    ("cache", "e"),
    [("bfloat16", 64), ("bfloat16", 20), ("float32", 32), ("8 bits", 32), ("4 bits", 64)],
)
@pytest.mark.covering(1)
def test_tokens_in_pieces(cache: str, e: int, instruction_set: str) -> None:
    """A prefill gives the same bits in one call, in pieces and token by token."""
    case = make_case(1, 300, 4, 2, e, 640, [230], cache=cache)
    whole = run(case, instruction_set)
    for cut in (1, 7, 128):
        begins = range(0, 300, cut) if cut > 1 else (0, 25, 26, 27, 150, 281, 282, 299)
        for begin in begins:
            part = {name: case[name][:, begin : begin + cut] for name in ("queries", "positions")}
            piece = run(case, instruction_set, lengths=case["lengths"] + begin, **part)
            same_bits(piece[0], whole[0, begin : begin + cut])


@pytest.mark.parametrize("window", [None, 30])
def test_a_tree_of_one_path_is_a_chain(window: int | None) -> None:
    case = make_case(2, 40, 4, 2, 64, 384, [256, 100], mask="chain", window=window)
    same_bits(run(case), run(case, ancestors=None))


def test_a_window_that_holds_all_is_none() -> None:
    case = make_case(2, 9, 4, 2, 64, 640, [600, 100])
    same_bits(run(case, window=10_000), run(case))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(
    ("cache", "h", "e"),
    [
        *((cache, 4, 24) for cache in CACHES),
        *((cache, 4, 64) for cache in CACHES[1:]),
        ("bfloat16", 14, 32),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 9, "sinks": 3}], ids=["all", "window"])
@pytest.mark.covering(1)
def test_a_trees_path_is_its_chain(
    options: dict[str, int], cache: str, h: int, e: int, instruction_set: str
) -> None:
    """A tree's path gives the same result as a chain, also across blocks."""
    for length in (0, 180, 250, 255, 256, 300):
        case = make_case(1, 21, h, 2, e, 512, [length], cache=cache, mask="tree", **options)
        tree = run(case, instruction_set)
        paths = np.asarray(case["ancestors"][0])
        longest = (paths >= 0).sum(1).argmax()
        for path in (path[path >= 0] for path in paths[[0, 5, 20, longest]]):
            same_bits(run(as_a_chain(case, path), instruction_set)[0], tree[0, path])


def as_a_chain(case: Case, path: np.ndarray) -> Case:
    """A chain of the tokens on one path of the first row's tree."""
    slots = int(case["lengths"][0]) + np.stack((path, np.arange(len(path))))[:, None]
    rows = np.zeros((1, 1), int)
    entries = {}
    for name in ("keys", "values"):
        layers = jax.tree.map(lambda part: part[:, None], case[name])
        entries[name] = jax.tree.map(lambda part: part[:, 0], moved(layers, rows, *slots))
    tokens = {name: case[name][:, path] for name in ("queries", "positions")}
    return case | entries | tokens | {"ancestors": None}


@pytest.mark.parametrize("threads", [1, 4])
def test_the_number_of_threads_changes_nothing(threads: int, tmp_path: Path) -> None:
    """A process with another number of threads divides the work differently."""
    case = make_case(1, 24, 4, 4, 64, 896, [800])
    path = tmp_path / "result.npy"
    code = (
        "import numpy as np; from tests.kernels.test_cpu_attention import make_case, run;"
        f"np.save({str(path)!r}, run(make_case(1, 24, 4, 4, 64, 896, [800])))"
    )
    environment = {"NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | environment)
    same_bits(np.load(path), run(case))


# --- Values that tokens do not see, and values that they see.


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(
    ("cache", "e"),
    [("float32", 24), ("bfloat16", 24), ("bfloat16", 64), ("8 bits", 64), ("4 bits", 64)],
)
@pytest.mark.parametrize("mask", [None, "chain"])
@pytest.mark.covering(1)
def test_nothing_leaks_from_what_is_not_seen(
    mask: str | None, cache: str, e: int, instruction_set: str
) -> None:
    case = make_case(2, 3, 4, 2, e, 384, [250, 60], cache=cache, mask=mask)
    clean = run(case, instruction_set)

    def spoil(name: str, *where: Any) -> Any:
        """Puts NaN at `where`, in the scales if the cache is quantized."""
        entries = case[name]
        codes = isinstance(entries, QuantizedEntries)
        part = (entries.scales if codes else entries).copy()
        for at in where:
            part[at] = 0x7FC0 if cache == "bfloat16" else np.nan
        return dataclasses.replace(entries, scales=part) if codes else part

    beyond = np.s_[0, 253:], np.s_[1, 63:]
    unused = {name: spoil(name, *beyond) for name in ("keys", "values")}
    same_bits(run(case, instruction_set, **unused), clean)
    last = {name: spoil(name, np.s_[0, 252]) for name in ("keys", "values")}  # the last token
    dirty = run(case, instruction_set, **last)
    same_bits(dirty[0, :2], clean[0, :2])
    same_bits(dirty[1], clean[1])
    assert np.isnan(dirty[0, 2]).all()


def test_who_sees_nothing_gets_zeros() -> None:
    case = make_case(2, 3, 4, 2, 16, 256, [0, 100])
    blind = run(case, ancestors=jnp.full((2, 3, 3), -1))
    assert (blind[0] == 0).all() and (blind[1] != 0).any()
    assert (run(case, window=0) == 0).all()


def test_a_trees_lengths_and_numbers_may_be_anything() -> None:
    """Slots beyond the cache are not seen, as in a chain, nor are ancestors outside 0 … T - 1."""
    case = make_case(2, 4, 2, 1, 16, 256, [0, 0], mask="chain")
    for lengths in ([1000, 254], [-3, -100], [256, 2**31 - 1], [-(2**31), 255]):
        other = case | {"lengths": jnp.asarray(lengths, jnp.int32)}
        same_bits(run(other), run(other, ancestors=None))
    wild = jnp.where(case["ancestors"] < 0, 2**31 - 1, case["ancestors"])
    same_bits(run(case, ancestors=wild), run(case))
    assert not run(case, ancestors=wild[:, :, :0]).any()


@pytest.mark.parametrize("lengths", [[1000, 250], [-3, -100], [256, 2**31 - 1]])
def test_lengths_past_the_cache_read_what_is_there(lengths: list[int]) -> None:
    case = make_case(2, 4, 2, 1, 16, 256, [0, 0])
    result = run(case, lengths=jnp.asarray(lengths, jnp.int32))
    expected, bound = exact(case | {"lengths": np.array(lengths)})
    assert (np.abs(result - expected) <= bound).all()


def test_empty() -> None:
    case = make_case(2, 3, 4, 2, 16, 256, [0, 100])
    assert run(case, queries=case["queries"][:, :0], positions=case["positions"][:, :0]).size == 0
    empty = {name: case[name][:, :0] for name in ("keys", "values")}
    assert (run(case, **empty) == 0).all()


# --- Composition and errors.


@pytest.mark.parametrize("mask", [None, "tree"])
def test_vmap(mask: str | None) -> None:
    cases = [make_case(2, 5, 4, 2, 16, 256, [20 + i, 100], mask=mask, seed=i) for i in range(3)]
    names = [name for name in OPERANDS if cases[0][name] is not None]

    def one(operands: dict[str, jax.Array], shared: dict[str, jax.Array]) -> jax.Array:
        case = cases[0] | operands | shared
        return cpu.attention(*operands_of(case), window=None, head_scale=0.25)

    for shared_names in ((), ("lengths", "positions"), ("keys", "values"), ("keys",)):
        shared = {n: cases[0][n] for n in shared_names}
        batch = {n: jnp.stack([c[n] for c in cases]) for n in names if n not in shared_names}
        together = np.asarray(jax.jit(jax.vmap(one, (0, None)))(batch, shared))
        for i, case in enumerate(cases):
            same_bits(together[i], run(case | shared, head_scale=0.25))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": jnp.zeros((2, 256, 3, 16))}, "do not fit"),
        ({"keys": jnp.zeros((2, 256, 2, 8))}, "do not fit"),
        ({"keys": jnp.zeros((1, 256, 2, 16))}, "do not fit"),
        ({"keys": jnp.zeros((2, 256, 2, 16), jnp.bfloat16)}, "keys must be"),
        ({"values": jnp.zeros((2, 128, 2, 16))}, "values must be"),
        ({"values": jnp.zeros((2, 256, 2, 16), jnp.uint16)}, "values has another type"),
        ({"queries": jnp.zeros((2, 3, 4, 16), jnp.float16)}, "queries must be"),
        ({"queries": jnp.zeros((2, 3, 4))}, "queries must be"),
        ({"lengths": jnp.zeros(3, jnp.int32)}, "lengths must be"),
        ({"lengths": jnp.zeros(2, jnp.uint32)}, "lengths has another type"),
        ({"positions": jnp.zeros((2, 4), jnp.int32)}, "positions must be"),
        ({"ancestors": jnp.zeros((2, 4, 3), jnp.int32)}, "ancestors must be"),
        ({"ancestors": jnp.zeros((1, 3, 3), jnp.int32)}, "ancestors must be"),
        ({"ancestors": jnp.zeros((2, 3), jnp.int32)}, "ancestors must be"),
        ({"ancestors": jnp.zeros((2, 3, 3), bool)}, "ancestors has another type"),
    ],
)
def test_errors(changes: dict[str, jax.Array], message: str) -> None:
    case = make_case(2, 3, 4, 2, 16, 256, [0, 100])
    with pytest.raises(Exception, match=message):
        run(case, **changes)


def test_an_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="instruction_set must be one of"):
        run(CASES["odd"], "mmx")
