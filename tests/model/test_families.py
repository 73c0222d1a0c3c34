"""Every supported family agrees with Hugging Face's torch implementation, and with itself.

The golden values are in `tests/golden`; everything there and here is float32.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.loading import load
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.model.transformer import forward
from specjax.speculation import trees
from tests.support.covering import representatives

pytestmark = pytest.mark.optimized

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(file.parent.name for file in GOLDEN.glob("*/golden.npz"))
OLDER_NAMES = sorted(file.parent.name for file in GOLDEN.glob("*/config_older.json"))
STOP_NAMES = ("llama3", "odd_sizes", "qwen3")  # two stop tokens; one at once; one, later
TREE_NAMES = ("llama3", "mistral", "qwen25_window")  # plain, windowed, windowed in some layers
CAPACITY = 256
TOLERANCE = 1e-4  # absolute, for logits up to 10; relative to the largest one beyond that

# Node n of row b follows node TREES[b, n], or the context where that is -1.
TREES = np.array([
    [-1, 0, 1, 2, -1, 4, 4],
    [-1, -1, 0, 0, 1, 3, 3],
    [-1, -1, -1, 2, 3, 3, 4],
])  # fmt: skip
DEPTH = 4

run = jax.jit(forward)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, B = 3 prompts and what Hugging Face makes of them (golden/README.md)."""

    params: Params
    prompts: np.ndarray  # int32[B, T]
    prompt_lengths: np.ndarray  # int32[B]
    logits: np.ndarray  # f32[B, T, V], zeros behind each prompt
    greedy: np.ndarray  # int32[B, new]
    stopped: np.ndarray  # int32[B, new], zeros behind each stop token
    stopped_counts: np.ndarray  # int32[B]

    @property
    def longest(self) -> np.ndarray:
        """The last prompt, which fills its row: int32[T]."""
        return self.prompts[-1]


def read_case(name: str) -> Case:
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return Case(load(GOLDEN / name), **arrays)


@pytest.fixture(
    scope="module", params=representatives(NAMES, "llama3", "odd_sizes", "qwen25_window", "qwen3")
)
def case(request: pytest.FixtureRequest) -> Case:
    return read_case(request.param)


@pytest.fixture(scope="module")
def batch_logits(case: Case) -> np.ndarray:
    """All prompts in one padded pass: f32[B, T, V]."""
    return np.asarray(prefill(case)[0])


def prefill(case: Case) -> tuple[jax.Array, KVCache]:
    """Logits of all prompts, and the cache that holds them."""
    rows, width = case.prompts.shape
    cache = KVCache.create(case.params.config, rows, CAPACITY)
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    logits, cache = run(case.params, case.prompts, positions, cache)
    return logits, cache.with_lengths(jnp.asarray(case.prompt_lengths))


def in_pieces(params: Params, tokens: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Logits of one prompt, `sizes` tokens at a time. tokens: int32[T] -> f32[T, V]."""
    cache = KVCache.create(params.config, 1, CAPACITY)
    logits = []
    for piece in np.split(tokens, np.cumsum(sizes)[:-1]):
        positions = cache.lengths[:, None] + jnp.arange(len(piece))
        piece_logits, cache = run(params, piece[None], positions, cache)
        cache = cache.with_lengths(cache.lengths + len(piece))
        logits.append(np.asarray(piece_logits[0]))
    return np.concatenate(logits)


# Logits are Hugging Face's.
def test_logits(case: Case, batch_logits: np.ndarray) -> None:
    valid = np.arange(case.prompts.shape[1]) < case.prompt_lengths[:, None]
    tolerance = TOLERANCE * max(1, np.abs(case.logits).max() / 10)
    np.testing.assert_allclose(batch_logits[valid], case.logits[valid], rtol=0, atol=tolerance)


# A row's logits do not depend, by a single bit, on its neighbours in a padded batch ...
def test_rows_alone(case: Case, batch_logits: np.ndarray) -> None:
    for row, length in enumerate(case.prompt_lengths[:-1]):
        alone = in_pieces(case.params, case.prompts[row, :length], [length])
        np.testing.assert_array_equal(alone, batch_logits[row, :length])


# ... nor on how many tokens a pass takes.
@pytest.mark.parametrize("head", [(), (1, 3)], ids=["one by one", "1, 3 and the rest"])
def test_pieces(case: Case, batch_logits: np.ndarray, head: tuple[int, ...]) -> None:
    tokens = case.longest
    sizes = (*head, len(tokens) - sum(head)) if head else (1,) * len(tokens)
    np.testing.assert_array_equal(in_pieces(case.params, tokens, sizes), batch_logits[-1])


# Greedy decoding gives Hugging Face's tokens, as many as were asked for ...
def test_greedy(case: Case) -> None:
    counts = np.full(len(case.greedy), case.greedy.shape[1])
    check_decode(case, case.greedy, counts, stop_tokens=())


# ... or up to and including one of the model's own stop tokens.
@pytest.mark.parametrize("name", STOP_NAMES)
def test_greedy_stops(name: str) -> None:
    case = read_case(name)
    assert case.stopped_counts.min() < case.greedy.shape[1]
    check_decode(case, case.stopped, case.stopped_counts, stop_tokens=None)


def check_decode(
    case: Case, new: np.ndarray, counts: np.ndarray, stop_tokens: tuple[int, ...] | None
) -> None:
    """`decode` gives each prompt, the first counts[b] tokens of new[b], and padding."""
    result = specjax.decode(
        case.params,
        case.prompts,
        prompt_lengths=case.prompt_lengths,
        drafter=specjax.Autoregressive(),
        max_new_tokens=new.shape[1],
        stop_tokens=stop_tokens,
    )
    expected = np.full(result.tokens.shape, case.params.config.pad_id)
    for row, (length, count) in enumerate(zip(case.prompt_lengths, counts, strict=True)):
        expected[row, :length] = case.prompts[row, :length]
        expected[row, length : length + count] = new[row, :count]
    np.testing.assert_array_equal(result.tokens, expected)
    np.testing.assert_array_equal(result.lengths, case.prompt_lengths + counts)


# A checkpoint described as transformers 4 did it is the same model.
@pytest.mark.parametrize("name", OLDER_NAMES)
def test_older_config(name: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / name / "model.safetensors", tmp_path)
    shutil.copy(GOLDEN / name / "config_older.json", tmp_path / "config.json")
    assert load(tmp_path).config == load(GOLDEN / name).config


# Every node of a token tree gets the logits of its root path run as a chain, bit for bit.
@pytest.mark.parametrize("name", TREE_NAMES)
def test_tree(name: str) -> None:
    case = read_case(name)
    _, cache = prefill(case)
    tokens = np.random.default_rng(0).integers(0, case.params.config.vocab_size, TREES.shape)
    paths = [[root_path(tree, node) for node in range(len(tree))] for tree in TREES]
    depths = np.array([[len(path) - 1 for path in row] for row in paths])
    positions = case.prompt_lengths[:, None] + depths
    ancestors = trees.ancestors(jnp.asarray(TREES))
    logits = np.asarray(run(case.params, tokens, positions, cache, ancestors)[0])
    for node in range(TREES.shape[1]):
        chain = run_paths(case, cache, tokens, [row[node] for row in paths])
        for row, depth in enumerate(depths[:, node]):
            np.testing.assert_array_equal(logits[row, node], chain[row, depth])


def root_path(tree: np.ndarray, node: int) -> list[int]:
    """Nodes from the root's child down to `node`."""
    parent = int(tree[node])
    return [*(root_path(tree, parent) if parent >= 0 else ()), node]


def run_paths(case: Case, cache: KVCache, tokens: np.ndarray, paths: list[list[int]]) -> np.ndarray:
    """Logits of one path per row as a chain behind the context: f32[B, DEPTH, V]."""
    chains = np.zeros((len(paths), DEPTH), np.int32)
    for row, path in enumerate(paths):
        chains[row, : len(path)] = tokens[row, path]
    positions = case.prompt_lengths[:, None] + np.arange(DEPTH)
    return np.asarray(run(case.params, chains, positions, cache)[0])
