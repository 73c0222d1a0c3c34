"""Log-probabilities: those of the model's own distribution, to the bit those of plain decoding."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import DraftModel, LayerSkip, Logprobs, Lookahead, MultiLevel, NGram, Retrieval
from specjax.drafting.datastore import Datastore
from specjax.generation.decoding import start
from specjax.model.kv_cache import KVCache
from specjax.speculation.logprobs import score_emitted
from tests.support.compiled import forward
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_model, random_prompts
from tests.support.tree_drafter import TreeDrafter

PARAMS = quantized_model()
SMALL = random_model(seed=1)
PROMPTS = random_prompts((3, 12, 7), CONFIG.vocab_size)
NEW, K = 16, 3
STORE = Datastore.create([np.arange(40) % 19], CONFIG.vocab_size)
DRAFTERS = {
    "none": specjax.Autoregressive(),
    "QSpec": specjax.QSpec(4, "a4"),
    "apart": specjax.QSpec(2, overwrite=False, schedule=specjax.Heuristic()),
    "layers": LayerSkip((0,), 3, confidence=0.05),
    "levels": MultiLevel(DraftModel(SMALL, 3), specjax.PromptLookup(2)),
    "n-grams": NGram(2),
    "window": Lookahead(3, 2, 2, capacity=64),
    "guesses": specjax.Combined(
        specjax.Spectra(3, 2, 1, capacity=64), Retrieval(STORE, depth=2, shortest=1)
    ),
    "tree": TreeDrafter(PARAMS, (2, 2), varied=True),
}
PENALTY = specjax.Sampling(temperature=0.7, top_p=0.95, repetition_penalty=1.3)


@jax.jit
def _logits(tokens: jax.Array) -> jax.Array:
    """The model's logits after every token, of one pass over whole texts."""
    cache = KVCache.create(CONFIG, *tokens.shape, 16, CONFIG.num_kv_heads)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(PARAMS, tokens, positions, cache)[0]


def _new(result: specjax.DecodeResult) -> tuple[np.ndarray, np.ndarray]:
    """The new tokens, [B, NEW], and the logits behind each of them; the output must be whole."""
    logits = np.asarray(_logits(result.tokens))
    places = [slice(len(prompt), len(prompt) + NEW) for prompt in PROMPTS]
    tokens = np.stack([row[place] for row, place in zip(result.tokens, places, strict=True)])
    behind = [slice(place.start - 1, place.stop - 1) for place in places]
    return tokens, np.stack([row[place] for row, place in zip(logits, behind, strict=True)])


def _same(given: Logprobs, expected: Logprobs) -> None:
    jax.tree.map(np.testing.assert_array_equal, given, expected)


def _decode(**options: object) -> specjax.DecodeResult:
    return specjax.decode(
        PARAMS, PROMPTS, **{"max_new_tokens": NEW, "stop_tokens": (), "logprobs": K, **options}
    )


@pytest.fixture(scope="module")
def plain() -> specjax.DecodeResult:
    return _decode(drafter=DRAFTERS["none"])


def test_they_are_the_log_softmax(plain) -> None:
    tokens, logits = _new(plain)
    expected = np.asarray(jax.nn.log_softmax(logits))
    own = np.take_along_axis(expected, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(plain.logprobs.tokens, own, atol=1e-5)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :K]
    np.testing.assert_array_equal(plain.logprobs.top_tokens, order)
    np.testing.assert_array_equal(plain.logprobs.top_tokens[..., 0], tokens)
    highest = np.take_along_axis(expected, order, axis=-1)
    np.testing.assert_allclose(plain.logprobs.top_logprobs, highest, atol=1e-5)


@pytest.mark.recompiled
@pytest.mark.parametrize("name", representatives([*DRAFTERS][1:], "levels", "tree"))
def test_no_drafter_changes_a_bit(name: str, plain) -> None:
    result = _decode(drafter=DRAFTERS[name])
    assert int(jnp.sum(result.stats.accepted)) > 0, "a case that tests nothing"
    _same(result.logprobs, plain.logprobs)


@pytest.mark.parametrize("name", representatives([*DRAFTERS], "QSpec"))
def test_they_know_nothing_of_sampling(name: str) -> None:
    """Temperature, top-p and a penalty choose the tokens, and change no log-probability."""
    result = _decode(drafter=DRAFTERS[name], sampling=PENALTY, key=jax.random.key(0))
    tokens, logits = _new(result)
    _same(result.logprobs, jax.jit(score_emitted, static_argnums=2)(logits, tokens, K))
    assert np.any(np.asarray(result.logprobs.top_tokens[..., 0]) != tokens)


def test_they_end_where_a_row_ends(plain) -> None:
    """Within a round: zeros stand behind the stop token."""
    outputs, _ = _new(plain)
    stop = int(outputs[0, NEW // 2])
    result = _decode(drafter=specjax.QSpec(8), stop_tokens=(stop,), logprobs=0)
    for row, output in enumerate(outputs.tolist()):
        end = output.index(stop) + 1 if stop in output else NEW
        expected = np.where(np.arange(NEW) < end, plain.logprobs.tokens[row], 0)
        np.testing.assert_array_equal(result.logprobs.tokens[row], expected)
    assert result.logprobs.top_tokens.shape == (len(PROMPTS), NEW, 0)


@pytest.mark.recompiled
@pytest.mark.exhaustive
def test_a_queue_changes_no_bit(plain) -> None:
    many = specjax.decode_many(
        PARAMS, [*PROMPTS, [], PROMPTS[0]], rows=2, max_new_tokens=NEW, stop_tokens=(),
        logprobs=K, stop_when=lambda number, output: number == 4 and len(output) >= 5,
    )  # fmt: skip
    for row, completion in enumerate(many[: len(PROMPTS)]):
        _same(completion.logprobs, jax.tree.map(lambda leaf, row=row: leaf[row], plain.logprobs))
    assert many[3].error is not None and many[3].logprobs is None
    _same(many[4].logprobs, jax.tree.map(lambda leaf: leaf[0, :5], plain.logprobs))


@pytest.mark.exhaustive
def test_they_compose_with_jit_and_vmap() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    prompt = jnp.array(PROMPTS[1])

    @partial(jax.jit, static_argnums=1)
    def sample(key: jax.Array, k: int | None) -> specjax.DecodeResult:
        return specjax.decode(
            PARAMS, prompt, max_new_tokens=8, sampling=PENALTY, key=key, logprobs=k
        )

    together = jax.vmap(lambda key: sample(key, 2))(keys)
    for number, key in enumerate(keys):
        _same(
            sample(key, 2).logprobs,
            jax.tree.map(lambda leaf, number=number: leaf[number], together.logprobs),
        )
    assert sample(keys[0], None).logprobs is None


def test_levels_between_do_not_carry_them() -> None:
    drafter = DRAFTERS["levels"]
    state = jax.eval_shape(partial(start, PARAMS, PROMPTS, drafter=drafter, logprobs=K))
    assert state.logprobs.top_tokens.shape == (len(PROMPTS), 64, K)
    level = jax.eval_shape(lambda state: drafter._enter(state.draft, state), state)
    assert level.logprobs is None
    plain = jax.eval_shape(partial(start, PARAMS, PROMPTS, drafter=drafter))
    without = dataclasses.replace(state, logprobs=None)
    assert jax.tree.structure(plain) == jax.tree.structure(without)


def test_of_equal_logits_the_lower_token_comes_first() -> None:
    logits = np.full((1, 1, 300), -1.0, np.float32)
    logits[0, 0, [7, 40, 200, 299]] = 0.0, -0.0, 0.0, 5.0
    logits[0, 0, 3] = -np.inf
    scored = score_emitted(jnp.asarray(logits), jnp.array([[3]]), 6)
    assert scored.top_tokens[0, 0].tolist() == [299, 7, 40, 200, 0, 1]
    assert scored.tokens.tolist() == [[-np.inf]]


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (-1, "logprobs must be in 0 … 96 or None, got -1"),
        (97, "logprobs must be in 0 … 96 or None, got 97"),
        (1.5, "logprobs must be an integer, got 1.5"),
    ],
)
def test_bad_numbers_get_one_clear_sentence(
    logprobs: object, message: str, wrong_types: None
) -> None:
    with pytest.raises(ValueError, match=message):
        _decode(logprobs=logprobs)
