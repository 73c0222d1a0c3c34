"""Sampling: the distribution of every emitted token is exactly the target's."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import specjax
from pallas_kernels.settings import own_settings
from specjax.speculation.acceptance import matching_chain, rejection_sample
from specjax.speculation.sampling import draw, greedy, probabilities, uniform_pairs
from tests.support.random_models import quantized_model


def _reference(logits: np.ndarray, sampling: specjax.Sampling) -> np.ndarray:
    """Temperature, top-k, top-p, by the book: one row, sorting a list."""
    values = logits / sampling.temperature
    p = np.exp(values - values.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept = order[: sampling.top_k]
    if sampling.top_p is not None:
        share, total, nucleus = p[kept] / p[kept].sum(), 0.0, []
        for index, mass in zip(kept, share, strict=True):
            if total >= sampling.top_p:
                break
            nucleus.append(index)
            total += mass
        kept = nucleus
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        specjax.Sampling(),
        specjax.Sampling(temperature=0.3),
        specjax.Sampling(top_k=3),
        specjax.Sampling(top_p=0.6),
        specjax.Sampling(temperature=1.7, top_k=9, top_p=0.8),
        specjax.Sampling(top_p=1e-6),
    ],
    ids=repr,
)
def test_probabilities_by_the_book(sampling: specjax.Sampling) -> None:
    logits = np.random.default_rng(0).normal(size=(6, 20)).astype(np.float32) * 2
    got = np.asarray(probabilities(jnp.asarray(logits), sampling))
    for row, expected in zip(got, (_reference(row, sampling) for row in logits), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-6)
        np.testing.assert_array_equal(row > 0, expected > 0)


# Over several blocks of a vocabulary, the last of them not full; many logits are equal.
@pytest.mark.parametrize("vocabulary", [300, 1024])
@pytest.mark.parametrize(
    "sampling",
    [
        specjax.Sampling(top_k=1),
        specjax.Sampling(top_k=50),
        specjax.Sampling(top_k=299),
        specjax.Sampling(top_p=0.37),
        specjax.Sampling(top_k=200, top_p=0.9),
    ],
    ids=repr,
)
def test_equal_logits_are_kept_by_their_ids(sampling: specjax.Sampling, vocabulary: int) -> None:
    logits = np.random.default_rng(1).integers(-3, 4, (4, vocabulary)).astype(np.float32)
    logits[1] = 0
    logits[2, ::3] = -np.inf
    got = np.asarray(jax.jit(lambda x: probabilities(x, sampling))(logits))
    for row, expected in zip(got, (_reference(row, sampling) for row in logits), strict=True):
        differing = np.flatnonzero((row > 0) != (expected > 0))
        assert len(differing) <= (sampling.top_p is not None), (
            "the last may be a matter of rounding"
        )
        if not len(differing):
            np.testing.assert_allclose(row, expected, atol=1e-6)


def test_draws_follow_their_weights() -> None:
    """Weights may have any sum, in any block; a weight of zero is never drawn, not even last."""
    rng = np.random.default_rng(0)
    weights = np.where(rng.random(700) < 0.1, rng.gamma(0.5, size=700), 0)
    weights[:130] = weights[600:] = 0
    keys = jax.random.split(jax.random.key(2), 40_000)
    pairs = uniform_pairs(keys)
    tokens = jax.jit(draw)(pairs, jnp.broadcast_to(jnp.float32(weights), (len(keys), 700)))
    counts = np.bincount(tokens, minlength=700)
    assert counts[weights == 0].sum() == 0
    expected = len(keys) * weights / weights.sum()
    many = expected > 10
    assert many.sum() > 30
    observed = [*counts[many], counts[~many].sum()]
    assert stats.chisquare(observed, [*expected[many], expected[~many].sum()]).pvalue > 1e-4
    one = jnp.zeros((3, 130)).at[:, 129].set(1e-30)
    np.testing.assert_array_equal(draw(pairs[:3], one), 129)


# greedy(logits) is argmax: the first of equals; any vocabulary.
@pytest.mark.parametrize("vocabulary", [100, 128, 896])
def test_greedy_is_argmax(vocabulary: int) -> None:
    logits = np.random.default_rng(0).integers(-3, 4, (3, 5, vocabulary)).astype(np.float32)
    logits[2, 0] = -np.inf
    np.testing.assert_array_equal(greedy(jnp.asarray(logits)), logits.argmax(-1))


def test_a_small_temperature_is_greedy_and_stays_finite() -> None:
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(50, 30)) * 20, jnp.float32)
    got = jax.jit(probabilities, static_argnums=1)(logits, specjax.Sampling(temperature=1e-6))
    np.testing.assert_array_equal(got, np.eye(30)[np.argmax(logits, axis=-1)])


def test_matching_by_brute_force() -> None:
    """All drafts of three tokens over a vocabulary of three, against a plain loop."""
    drafts = np.array(list(itertools.product(range(3), repeat=3)), np.int32)
    logits = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    choices = logits.argmax(-1)
    accepted = matching_chain(
        jnp.asarray(drafts), jnp.full(27, 3), jnp.broadcast_to(jnp.asarray(choices), (27, 4))
    )
    for draft, count in zip(drafts, accepted, strict=True):
        expected = 0
        while expected < 3 and draft[expected] == choices[expected]:
            expected += 1
        assert int(count) == expected


def test_rejection_sampling_has_the_targets_distribution() -> None:
    """Two drafted positions, four tokens: the frequency of every emitted pair, chi-square."""
    rng = np.random.default_rng(2)
    draft, target = (rng.dirichlet(np.ones(4), 3) for _ in range(2))
    samples = 60_000
    keys = jax.random.split(jax.random.key(3), samples)

    @jax.jit
    @jax.vmap
    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        draw, decide = jax.random.split(key)
        tokens = jax.vmap(jax.random.categorical)(
            jax.random.split(draw, 2), jnp.log(jnp.asarray(draft[:2], jnp.float32))
        )
        accepted, emitted = rejection_sample(
            decide[None],
            tokens[None].astype(jnp.int32),
            jnp.array([2]),
            jnp.asarray(draft[None, :2], jnp.float32),
            jnp.asarray(target[None], jnp.float32),
        )
        return accepted[0], emitted[0]

    accepted, emitted = (np.asarray(x) for x in run(keys))
    first = np.bincount(emitted[:, 0], minlength=4)
    assert stats.chisquare(first, target[0] * samples).pvalue > 1e-3
    second = emitted[accepted >= 1, 1]  # its distribution does not depend on the first being kept
    assert stats.chisquare(np.bincount(second, minlength=4), target[1] * len(second)).pvalue > 1e-3
    third = emitted[accepted == 2, 2]
    assert stats.chisquare(np.bincount(third, minlength=4), target[2] * len(third)).pvalue > 1e-3
    share = np.minimum(draft[0], target[0]).sum()  # acceptance: 1 - total variation distance
    assert abs((accepted >= 1).mean() - share) < 0.01


def test_what_other_rows_draft_changes_no_rejection() -> None:
    """A batch is as wide as its longest draft."""
    rng = np.random.default_rng(5)
    draft, target = (jnp.float32(rng.dirichlet(np.ones(9), (64, n))) for n in (3, 4))
    proposed = jnp.asarray(rng.integers(9, size=(64, 3)), jnp.int32)
    one = jnp.ones(64, jnp.int32)

    @own_settings()
    def sampled(width: int) -> list[list[int]]:
        accepted, emitted = rejection_sample(
            jax.random.split(jax.random.key(6), 64), proposed[:, :width], one, draft[:, :width],
            target[:, : width + 1],
        )  # fmt: skip
        return [
            row[: count + 1] for row, count in zip(emitted.tolist(), accepted.tolist(), strict=True)
        ]

    assert sampled(1) == sampled(3)


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_keys_of_another_generator_are_one_per_row(kind: str) -> None:
    """JAX gives rows of a batch that draw with such keys the first row's numbers."""
    params, prompt = quantized_model(), [[5, 6, 7]] * 3
    keys = jax.random.split(jax.random.key(1, impl=kind), 3)
    options = {"sampling": specjax.Sampling(), "max_new_tokens": 6, "stop_tokens": ()}
    together = specjax.decode(params, prompt, key=keys, **options).tokens
    alone = [specjax.decode(params, prompt[:1], key=keys[i : i + 1], **options) for i in range(3)]
    np.testing.assert_array_equal(together, np.concatenate([each.tokens for each in alone]))
    assert len(np.unique(np.asarray(together), axis=0)) == 3
