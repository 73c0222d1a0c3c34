"""A row's distributions and samples have the same bits whatever shares the call with it.

XLA compiles one program per shape. These tests compare rows of several, in the quick compilation
of most tests and in that of users' programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import specjax
from specjax.generation.decoding import start
from specjax.model.params import Params
from specjax.speculation.acceptance import rejection_sample, sample_path
from specjax.speculation.logprobs import score_emitted
from specjax.speculation.penalties import Earlier
from specjax.speculation.sampling import probabilities
from specjax.speculation.state import DecodeState, Proposal
from specjax.speculation.verification import verify
from tests.support.random_models import CONFIG, random_model

SMALL, LARGE = 4093, 49152
SAMPLINGS = {
    "temperature": specjax.Sampling(temperature=0.9),
    "nucleus": specjax.Sampling(temperature=0.7, top_k=300, top_p=0.95, min_p=1e-4),
    "penalty": specjax.Sampling(top_p=0.9, repetition_penalty=1.3),
    "penalties": specjax.Sampling(
        repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.3
    ),
}
WHICH = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
exhaustive = pytest.mark.exhaustive
WELL = [pytest.mark.optimized, exhaustive]
COMPILED = pytest.mark.parametrize("compiled", ["quickly", pytest.param("well", marks=WELL)])
VOCABULARIES = pytest.mark.parametrize("vocabulary", [SMALL, pytest.param(LARGE, marks=exhaustive)])
SHAPES = pytest.mark.parametrize(
    "shapes",
    [
        ((1,), (2,), (3, 1), (1, 9)),
        pytest.param(
            (*((rows,) for rows in range(4, 10)), (32,), (2, 1), (4, 8), (8, 4), (3, 3)),
            marks=exhaustive,
        ),
    ],
    ids=["few", "many"],
)


@COMPILED
@SHAPES
@VOCABULARIES
@WHICH
def test_distributions_of_any_shape(
    sampling: specjax.Sampling, vocabulary: int, shapes: tuple[tuple[int, ...], ...], compiled: str
) -> None:
    """Rows and positions: [...] places are the first ones of 32, bit for bit."""
    logits = 3 * jax.random.normal(jax.random.key(vocabulary), (32, vocabulary))
    counts = (jnp.arange(vocabulary) + jnp.arange(32)[:, None]) % 5
    run = jax.jit(probabilities, static_argnums=1)
    whole = np.asarray(run(logits, sampling, Earlier(counts > 0, counts)))
    for shape in shapes:
        count = int(np.prod(shape))
        first, marks = (x[:count].reshape(*shape, vocabulary) for x in (logits, counts))
        earlier = Earlier(marks > 0, marks)
        given = np.asarray(run(first, sampling, earlier)).reshape(count, vocabulary)
        np.testing.assert_array_equal(given, whole[:count], err_msg=str(shape))


@COMPILED
@SHAPES
@VOCABULARIES
def test_log_probabilities_of_any_shape(
    vocabulary: int, shapes: tuple[tuple[int, ...], ...], compiled: str
) -> None:
    """As above, with the most probable tokens at each place."""
    logits = 3 * jax.random.normal(jax.random.key(vocabulary), (1, 32, vocabulary))
    tokens = jnp.arange(32, dtype=jnp.int32)[None] % vocabulary
    run = jax.jit(score_emitted, static_argnums=2)
    whole = run(logits, tokens, 3)
    for shape in shapes:
        rows, places = (shape[0], 1) if len(shape) == 1 else shape
        count = rows * places
        given = run(
            logits[0, :count].reshape(rows, places, vocabulary),
            tokens[0, :count].reshape(rows, places), 3,
        )  # fmt: skip
        for ours, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(whole), strict=True):
            flat = np.asarray(ours).reshape(count, *ours.shape[2:])
            np.testing.assert_array_equal(flat, theirs[0, :count], err_msg=str(shape))


def _tiny(vocabulary: int) -> Params:
    return random_model(
        dataclasses.replace(CONFIG, vocab_size=vocabulary, hidden_size=32, num_layers=1)
    )


@COMPILED
@VOCABULARIES
def test_distributions_of_a_pass(vocabulary: int, compiled: str) -> None:
    """The target's distributions after 0 … 6 drafts, alone, beside other rows, and in a tree."""
    params = _tiny(vocabulary)
    drafts = jnp.array([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3]], jnp.int32)

    whole = start(
        params, [[1, 2, 3], [4, 5, 6, 7], [8]], max_new_tokens=8, key=jax.random.key(0),
        drafter=specjax.Autoregressive(), sampling=specjax.Sampling(temperature=0.9),
    )  # fmt: skip

    @partial(jax.jit, static_argnums=(0, 1))
    def run(width: int, tree: tuple[int, ...] | None, state: DecodeState) -> jax.Array:
        tokens = drafts[: len(state.lengths), :width]
        parents = None if tree is None else jnp.broadcast_to(jnp.array(tree), tokens.shape)
        drawn = jax.nn.one_hot(tokens, vocabulary)  # so that the rule asks for all distributions
        proposal = Proposal(tokens, parents=parents, distributions=drawn)
        verified, _ = verify(params, state, proposal)
        return verified.distributions[0]

    def distributions(rows: int, width: int, tree: tuple[int, ...] | None = None) -> np.ndarray:
        """After the last token of row 0, and after every draft that counts."""
        return np.asarray(run(width, tree, jax.tree.map(lambda leaf: leaf[:rows], whole)))

    alone = distributions(1, 6)
    for rows, width in ((3, 6), (2, 3), (3, 0), (1, 0)):
        together = distributions(rows, width)
        np.testing.assert_array_equal(together, alone[: width + 1], err_msg=f"{rows}, {width}")
    bush = distributions(2, 6, (-1, -1, -1, -1, -1, -1))
    np.testing.assert_array_equal(bush[0], alone[0])


def test_no_reduction_of_floats_is_left_to_the_compiler() -> None:
    """Not in distributions, what rejection leaves and draws from, and the lengths of drafts."""
    rows, n, v = 3, 4, SMALL
    keys = jax.random.split(jax.random.key(0), rows)
    tokens = parents = jnp.zeros((rows, n), jnp.int32)
    p = jnp.ones((rows, n + 1, v))
    sampled = [
        jax.make_jaxpr(lambda p, s=sampling: probabilities(p, s, Earlier(p > 0, p > 0)))(p)
        for sampling in SAMPLINGS.values()
    ]
    chain = jax.make_jaxpr(rejection_sample)(keys, tokens, tokens[:, 0], p[:, 1:], p)
    tree = jax.make_jaxpr(sample_path)(keys, tokens, parents, tokens > 0, p[:, 1:], p)
    scored = jax.make_jaxpr(score_emitted, static_argnums=2)(p, jnp.zeros((rows, n + 1), int), 2)
    lengths = jax.make_jaxpr(lambda state: specjax.Adaptive().lengths(state, 8))(p[:, 0, :2])
    for program in (*sampled, scored, chain, tree, lengths):
        assert not set(_reductions_of_floats(program.jaxpr))


def _reductions_of_floats(program: core.Jaxpr) -> Iterator[str]:
    for equation in program.eqns:
        name = equation.primitive.name
        if name.startswith(("reduce", "cum", "dot")) and equation.invars[0].aval.dtype.kind == "f":
            yield name
    for inner in core.subjaxprs(program):
        yield from _reductions_of_floats(inner)


# With sums in XLA's order, the first two draw a neighbour of their token in the vocabulary beside
# another row, and so did the others with another model.
@pytest.mark.optimized
@pytest.mark.parametrize("seed", [97402, 325643, 563325, 746289])
def test_a_row_alone_and_beside_another(tiny: Params, seed: int) -> None:
    key = jax.random.key(seed)
    options = {
        "max_new_tokens": 1, "drafter": specjax.Autoregressive(), "key": key,
        "sampling": specjax.Sampling(temperature=0.9),
    }  # fmt: skip
    alone = specjax.decode(tiny, [[1, 2, 3]], **options).tokens[0]
    beside = specjax.decode(tiny, [[1, 2, 3], [1, 2, 3]], **options).tokens[0]
    np.testing.assert_array_equal(beside, alone)
    (first, _) = specjax.decode_many(tiny, [[1, 2, 3], [1, 2, 3]], rows=2, **options)
    np.testing.assert_array_equal(first.tokens, alone)


@pytest.fixture(scope="module")
def tiny() -> Params:
    return _tiny(SMALL)
