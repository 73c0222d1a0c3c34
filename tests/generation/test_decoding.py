"""The promise: greedy output with any drafter is bit-identical to greedy output without one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.quantization import quantize
from specjax.generation.decoding import start
from specjax.speculation.rounds import step
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_model, random_prompts

pytestmark = pytest.mark.optimized

PROMPTS = random_prompts((3, 7, 12), CONFIG.vocab_size)
NEW = 24
DRAFTERS = [
    specjax.QSpec(),
    specjax.QSpec(draft_length=1, activation="a4"),
    specjax.QSpec(draft_length=5, activation="a4"),
    specjax.QSpec(draft_length=8, activation="a8"),
    specjax.QSpec(overwrite=False, activation="a4"),
]
with_and_without_drafts = pytest.mark.parametrize(
    "drafter",
    representatives([specjax.QSpec(), specjax.Autoregressive()], specjax.QSpec()),
    ids=repr,
)


@pytest.fixture(scope="module")
def params() -> specjax.Params:
    return quantized_model()


@pytest.fixture(scope="module")
def plain(params: specjax.Params) -> specjax.DecodeResult:
    return specjax.decode(params, PROMPTS, max_new_tokens=NEW, drafter=specjax.Autoregressive())


@pytest.mark.parametrize("drafter", representatives(DRAFTERS, DRAFTERS[0], DRAFTERS[-1]), ids=repr)
def test_greedy_output_does_not_change(params, plain, drafter) -> None:
    result = specjax.decode(params, PROMPTS, max_new_tokens=NEW, drafter=drafter)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.lengths, plain.lengths)
    assert 0 < float(result.stats.acceptance_rate) < 1, "a case that tests nothing"


def test_every_row_is_its_solo_decode(params, plain) -> None:
    width = max(map(len, PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        padded = np.pad(prompt, (0, width - len(prompt)), constant_values=-1)[None]
        solo = specjax.decode(params, padded, prompt_lengths=[len(prompt)], max_new_tokens=NEW)
        np.testing.assert_array_equal(solo.tokens[0], plain.tokens[row])


def test_cache_is_that_of_plain_decoding_after_every_round(params) -> None:
    """Committed slots hold the bits that plain decoding writes, whatever was drafted over them."""
    options = {"max_new_tokens": NEW, "cache_capacity": 64}
    drafter = specjax.QSpec(draft_length=4, activation="a4")
    plain = start(params, PROMPTS, drafter=specjax.Autoregressive(), **options)
    while not plain.finished.all():
        plain, _ = step(params, plain, specjax.Autoregressive())
    state = start(params, PROMPTS, drafter=drafter, **options)
    while not state.finished.all():
        state, _ = step(params, state, drafter)
        np.testing.assert_array_equal(state.cache.lengths, state.lengths - 1)
        for name in ("keys", "values"):
            ours, theirs = (getattr(s.cache, name) for s in (state, plain))
            for row, length in enumerate(np.asarray(state.cache.lengths)):
                np.testing.assert_array_equal(ours[row, :, :length], theirs[row, :, :length])


def test_without_overwriting_fewer_drafts_are_kept_apart(params) -> None:
    """overwrite=False drafts from its own cache, whose entries differ from the target's."""
    drafter = specjax.QSpec(activation="a4", overwrite=False)
    state = start(params, PROMPTS, drafter=drafter, max_new_tokens=NEW)
    for _ in range(3):
        state, _ = step(params, state, drafter)
    length = int(state.cache.lengths[0])
    own, target = state.draft.cache.keys[0, 0, :length], state.cache.keys[0, 0, :length]
    prompt = len(PROMPTS[0]) - 1
    np.testing.assert_array_equal(own[:prompt], target[:prompt])  # the prefill is shared
    assert np.any(np.asarray(own[prompt:]) != np.asarray(target[prompt:]))


def test_stop_tokens_end_rows_and_stay(params, plain) -> None:
    row = np.asarray(plain.tokens[0, : plain.lengths[0]])
    generated = row[len(PROMPTS[0]) :]
    stop = int(generated[NEW // 2])
    first = int(np.argmax(generated == stop))
    for drafter in (specjax.Autoregressive(), specjax.QSpec(draft_length=8)):
        result = specjax.decode(
            params, PROMPTS, max_new_tokens=NEW, drafter=drafter, stop_tokens=(stop,)
        )
        assert int(result.lengths[0]) == len(PROMPTS[0]) + first + 1
        assert int(result.tokens[0, result.lengths[0] - 1]) == stop
        assert (np.asarray(result.tokens[0, result.lengths[0] :]) == CONFIG.pad_id).all()


def test_models_own_stop_tokens_are_the_default(params, plain) -> None:
    stop = int(plain.tokens[0, len(PROMPTS[0]) + 2])
    config = dataclasses.replace(CONFIG, stop_tokens=(stop,))
    stopping = dataclasses.replace(params, config=config)
    assert (
        int(specjax.decode(stopping, PROMPTS, max_new_tokens=NEW).lengths[0])
        < len(PROMPTS[0]) + NEW
    )
    ignoring = specjax.decode(stopping, PROMPTS, max_new_tokens=NEW, stop_tokens=())
    np.testing.assert_array_equal(ignoring.tokens, plain.tokens)


def test_stats_add_up(params) -> None:
    result = specjax.decode(params, PROMPTS, max_new_tokens=NEW, drafter=specjax.QSpec())
    stats = jax.tree.map(np.asarray, result.stats)
    assert (stats.generated == NEW).all()
    assert (stats.drafted == 3 * stats.rounds).all()
    assert (stats.accepted <= stats.tested).all() and (stats.tested <= stats.drafted).all()
    # Every round gives the accepted drafts and one token more, but for what the limit cut off.
    cut = stats.accepted + stats.rounds - stats.generated
    assert ((cut >= 0) & (cut <= 3)).all()


def test_composes_with_jit(params) -> None:
    compiled = jax.jit(specjax.decode, static_argnames=("max_new_tokens",))
    prompt = jnp.array([PROMPTS[1]])
    expected = specjax.decode(params, prompt, max_new_tokens=8)
    np.testing.assert_array_equal(
        compiled(params, prompt, max_new_tokens=8).tokens, expected.tokens
    )


def test_composes_with_vmap_over_keys(params) -> None:
    keys = jax.random.split(jax.random.key(0), 3)

    def sample(key: jax.Array) -> jax.Array:
        return specjax.decode(
            params, jnp.array(PROMPTS[1]), max_new_tokens=8, drafter=specjax.QSpec(3, "a4"),
            sampling=specjax.Sampling(), key=key,
        ).tokens  # fmt: skip

    together = jax.vmap(sample)(keys)
    for key, tokens in zip(keys, together, strict=True):
        np.testing.assert_array_equal(sample(key), tokens)
    assert len({tuple(np.asarray(tokens[0]).tolist()) for tokens in together}) > 1


@pytest.mark.exhaustive
def test_a_rows_sample_depends_on_its_key_alone(params) -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    options = {"max_new_tokens": 8, "sampling": specjax.Sampling(temperature=0.9, top_p=0.95)}
    together = specjax.decode(params, PROMPTS, key=keys, **options)
    reordered = specjax.decode(params, PROMPTS[::-1], key=keys[::-1], **options)
    np.testing.assert_array_equal(reordered.tokens[::-1], together.tokens)
    alone = specjax.decode(params, PROMPTS[2], key=keys[2:], **options)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[2])


def test_nothing_recompiles(params) -> None:
    drafter = specjax.QSpec(draft_length=2)
    options = {"drafter": drafter, "max_new_tokens": 12}
    state = start(params, PROMPTS, **options)
    state, _ = step(params, state, drafter)
    compiled = step._cache_size()
    while not state.finished.all():
        state, _ = step(params, state, drafter)
    other = start(params, random_prompts((3, 7, 12), CONFIG.vocab_size, seed=5), **options)
    step(params, other, drafter)
    assert step._cache_size() == compiled


def test_qspec_adds_no_second_copy(params) -> None:
    """Live buffers while decoding: the state of QSpec is that of plain decoding, byte for byte."""

    def state_bytes(drafter: specjax.Drafter) -> int:
        state = start(params, PROMPTS, max_new_tokens=NEW, drafter=drafter, cache_capacity=128)
        state, _ = step(params, state, drafter)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    assert state_bytes(specjax.QSpec()) == state_bytes(specjax.Autoregressive())


@with_and_without_drafts
def test_weights_are_never_unpacked_as_a_whole(drafter: specjax.Drafter) -> None:
    """Temporaries of the whole compiled decode stay far below the weights: no second copy of the
    packed layers, of a 16-bit embedding or of a 16-bit head, whatever their sizes divide by."""
    config = dataclasses.replace(
        CONFIG, dtype="bfloat16", vocab_size=8190, hidden_size=320, intermediate_size=1100
    )
    plain = random_model(config)
    for params in (plain, quantize(plain)) if drafter.draft_length == 0 else (quantize(plain),):
        compiled = jax.jit(specjax.decode, static_argnames="max_new_tokens").lower(
            params, jnp.ones((1, 3), jnp.int32), max_new_tokens=16, drafter=drafter
        )
        temporaries = compiled.compile().memory_analysis().temp_size_in_bytes
        assert temporaries < params.nbytes / 4


@with_and_without_drafts
def test_the_cache_is_updated_in_place(params, drafter) -> None:
    """A round's temporaries do not grow with the cache, and its state is used up, not copied."""

    def temporaries(capacity: int) -> int:
        state = start(params, PROMPTS, drafter=drafter, max_new_tokens=8, cache_capacity=capacity)
        compiled = step.lower(params, state, drafter).compile()
        state, _ = step(params, (before := state), drafter)
        assert before.cache.keys.is_deleted()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) <= temporaries(256) + 4096


def test_unquantized_model_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"specjax\.quantize"):
        specjax.decode(random_model(), PROMPTS, drafter=specjax.QSpec())


BAD = [
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [[1, 2], []]}, "prompt row 1 is empty"),
    ({"prompt": np.zeros((1, 0), np.int32)}, "prompt is empty"),
    ({"prompt": [[1, CONFIG.vocab_size]]}, f"token {CONFIG.vocab_size} .*vocabulary of 96"),
    ({"prompt": np.array([[-1, 2]])}, "token -1 "),
    ({"prompt": np.array([1.0, 2.0])}, "integers .*float64"),
    ({"prompt": np.zeros((1, 1, 1), int)}, r"shape \[T\] or \[B, T\]"),
    ({"prompt": [1] * 600}, "512 positions"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ({"max_new_tokens": -3}, "max_new_tokens must be at least 1, got -3"),
    ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer"),
    ({"stop_tokens": (CONFIG.vocab_size,)}, "stop token 96 is outside the vocabulary"),
    ({"cache_capacity": 8}, "cache_capacity=8 is too small"),
    ({"prompt_lengths": [1]}, "prompt_lengths goes with an array"),
    ({"prompt": np.ones((2, 3), int), "prompt_lengths": [3, 4]}, "in 1 … 3, got 4 in row 1"),
    ({"prompt": np.ones((2, 3), int), "prompt_lengths": [3]}, r"shape \(2,\)"),
    ({"prompt": 5}, "prompt must be token ids"),
    ({"prompt": [1, [2, 3]]}, "a token of prompt row 0 must be an integer"),
    ({"prompt": [[1, 2], 3]}, "prompt row 1 must be a list of token ids, got 3"),
    ({"prompt": [1, 2.5]}, "a token of prompt row 0 must be an integer, got 2.5"),
    ({"prompt": np.ones((2, 3), int), "prompt_lengths": ["a", "b"]}, "prompt_lengths must hold"),
    ({"stop_tokens": 5}, "stop_tokens must be a sequence of token ids, got 5"),
    ({"stop_tokens": (1.7,)}, "a stop token must be an integer, got 1.7"),
    ({"cache_capacity": 200.5}, "cache_capacity must be an integer, got 200.5"),
    ({"drafter": "qspec"}, "drafter must be a drafter such as .* got 'qspec'"),
    ({"drafter": specjax.QSpec}, "drafter must be a drafter"),
    ({"drafter": specjax.QSpec(10**6)}, "drafts of 1000000 tokens exceed the 512 positions"),
    ({"params": "tiny"}, "params must be what specjax.load returns, got str"),
    ({"sampling": 0.8}, "sampling must be a specjax.Sampling or None, got 0.8"),
    ({"sampling": specjax.Sampling(), "key": 42}, "key must be made by jax.random.key, got 42"),
    ({"sampling": specjax.Sampling()}, "sampling needs key"),
    ({"key": jax.random.key(0)}, "key goes with sampling"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_gets_one_clear_sentence(params, change, message) -> None:
    arguments = {"params": params, "prompt": [1, 2, 3], **change}
    with pytest.raises(ValueError, match=message):
        specjax.decode(**arguments)


@pytest.mark.usefixtures("wrong_types")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: specjax.QSpec(draft_length=0), "draft_length must be at least 1, got 0"),
        (lambda: specjax.QSpec(activation="a2"), "a16, a8, a4, got 'a2'"),
        (lambda: specjax.QSpec(activation="a16"), "verifier's"),
        (lambda: specjax.QSpec(draft_length=1.5), "draft_length must be an integer, got 1.5"),
        (lambda: specjax.Sampling(temperature=0), r"temperature must be in \[1e-6, 1e6\], got 0"),
        (lambda: specjax.Sampling(temperature="hot"), "temperature must be a number, got 'hot'"),
        (lambda: specjax.Sampling(top_k=2.5), "top_k must be an integer, got 2.5"),
        (lambda: specjax.Sampling(top_p=0), "top_p"),
        (lambda: specjax.Sampling(top_k=0), "top_k"),
    ],
)
def test_choices_are_checked_when_made(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.exhaustive
def test_a_model_with_plain_layers_among_quantized_ones() -> None:
    """As checkpoints of other projects leave some out: those layers take 16-bit activations."""
    plain, quantized = random_model(), quantized_model(group_size=32)
    kept = dataclasses.replace(quantized.layers[0], q=plain.layers[0].q, down=plain.layers[0].down)
    params = dataclasses.replace(quantized, layers=(kept, *quantized.layers[1:]))
    prompt = random_prompts((6, 11), CONFIG.vocab_size)
    outputs = [
        specjax.decode(params, prompt, max_new_tokens=24, drafter=drafter, stop_tokens=())
        for drafter in (specjax.Autoregressive(), specjax.QSpec(activation="a4"))
    ]
    np.testing.assert_array_equal(outputs[0].tokens, outputs[1].tokens)
    assert int(outputs[1].stats.accepted.sum()) > 0
