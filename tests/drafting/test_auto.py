"""Auto: the output is plain decoding's, sampled too, and it drafts where that pays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.drafting.acceptance_rates import Guess
from specjax.drafting.costs import Costs
from specjax.drafting.suffix import longest_match
from specjax.generation.decoding import _rested, start
from specjax.generation.request import Request
from specjax.speculation.rounds import step
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState, Verified
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_model

PARAMS = quantized_model()
REPEATED = np.tile(np.array([[5, 6, 7, 8], [9, 4, 9, 3], [2, 2, 3, 2]], np.int32), (1, 4))
NEW = 24


def costs(passes: list[float], draft: float, look: float = 0.0) -> Costs:
    return Costs(np.array(passes, np.float32), np.float32(draft), np.float32(look))


FREE, DEAR = costs([1, 1, 1, 1], 0.01), costs([1, 9, 9, 9], 9)
# A draft of the model that costs less than the text's guesses are worth.
OWN = costs([1, 1.01, 1.02, 1.5], 0.02)
CHOICES = {
    "text": specjax.Auto(FREE),
    "nothing": specjax.Auto(DEAR),
    "its model": specjax.Auto(OWN, specjax.QSpec(3, "a8")),
    "one width": specjax.Auto(dataclasses.replace(OWN, least=7), specjax.QSpec(3, "a8")),
    "coarse": specjax.Auto(OWN, specjax.QSpec(5, "a4")),
    "some layers": specjax.Auto(OWN, specjax.LayerSkip((0,), 2)),
}


def decode(drafter: specjax.Drafter, sampling: Sampling | None = None) -> specjax.DecodeResult:
    key = None if sampling is None else jax.random.key(7)
    return specjax.decode(
        PARAMS, REPEATED, max_new_tokens=NEW, drafter=drafter, sampling=sampling, key=key,
        stop_tokens=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "sampling", [None, Sampling(temperature=0.6, top_k=8)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", representatives(CHOICES, "nothing", "its model"))
@pytest.mark.covering(1)
def test_output_is_that_of_plain_decoding(name: str, sampling: Sampling | None) -> None:
    plain = decode(specjax.Autoregressive(), sampling)
    ours = decode(CHOICES[name], sampling)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    assert (int(ours.stats.drafted.sum()) == 0) == (name == "nothing")


@pytest.mark.exhaustive
def test_a_batch_that_gains_nothing_rests_between_looks() -> None:
    drafter = specjax.Auto(costs([1, 9, 9, 9], 9, look=0.02))
    state = start(PARAMS, REPEATED, drafter=drafter, max_new_tokens=4)
    looked = []
    for _ in range(40):
        _, state = drafter.propose(PARAMS, state)
        looked.append(bool(np.any(state.draft.text.counts)))
    first = looked.index(False)
    assert 5 < first < 25 and all(looked[:first])
    rests = [place for place in range(first, 40) if looked[place]]
    assert rests == list(range(first + 4, 40, 5))  # a look in 200 rounds' time


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize(
    "sampling", [None, Sampling(temperature=0.6, top_k=8)], ids=["greedy", "sampled"]
)
def test_a_rest_changes_no_output(sampling: Sampling | None, loops: bool) -> None:
    ours = decode(
        specjax.Auto(dataclasses.replace(FREE, look=np.float32(9), loops=loops)), sampling
    )
    plain = decode(specjax.Autoregressive(), sampling)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    drafted = np.asarray(ours.stats.drafted)
    assert np.all(drafted <= 7) and np.any(drafted)  # in the first round, before the long rest
    assert np.all(np.asarray(ours.stats.rounds) >= NEW - 7)


@pytest.mark.parametrize("dear", [True, False])
def test_every_door_drafts_by_the_measured_costs(
    monkeypatch: pytest.MonkeyPatch, dear: bool
) -> None:
    """Streams too, whose rounds are programs of their own."""
    auto = CHOICES["nothing" if dear else "text"]
    monkeypatch.setattr("specjax.generation.request.settled", lambda *_: auto)
    prompt = REPEATED[0].tolist()

    def drafts(each: specjax.Round) -> int:
        return len(each.accepted) + len(each.rejected)

    options = {"max_new_tokens": NEW, "stop_tokens": ()}
    drafted = [
        sum(map(drafts, specjax.stream(PARAMS, prompt, **options))),
        sum(drafts(each) for _, each in specjax.stream_many(PARAMS, [prompt], **options)),
        int(specjax.decode_many(PARAMS, [prompt], rows=1, **options)[0].stats.drafted),
        int(specjax.decode(PARAMS, prompt, **options).stats.drafted.sum()),
    ]
    assert [count == 0 for count in drafted] == [dear] * 4


def test_a_rest_in_a_loop_of_its_own_ends() -> None:
    drafter = specjax.Auto(dataclasses.replace(FREE, look=np.float32(9), loops=True))
    options = {"drafter": drafter, "max_new_tokens": NEW, "stop_tokens": ()}
    state = start(PARAMS, REPEATED, **options)
    state = dataclasses.replace(state, draft=state.draft._replace(rest=jnp.full(3, 5)))
    after = _rested(PARAMS, Request.make(PARAMS, **options), state)
    assert after.stats.generated.tolist() == [5] * 3
    assert after.draft.rest.tolist() == [0] * 3


def test_a_round_gives_back_the_types_of_its_state() -> None:
    """Rounds that are programs of their own would be compiled twice."""
    state = start(PARAMS, REPEATED, drafter=CHOICES["its model"], max_new_tokens=8)
    before = jax.tree.map(jax.typeof, state)
    after, _ = step(PARAMS, state, CHOICES["its model"])
    assert jax.tree.map(jax.typeof, after) == before


def test_a_gain_ends_the_rests() -> None:
    drafter = specjax.Auto(dataclasses.replace(FREE, look=np.float32(0.1)))
    state = start(PARAMS, REPEATED, drafter=drafter, max_new_tokens=8)
    state = dataclasses.replace(state, draft=state.draft._replace(worth=jnp.zeros(3)))
    proposal, state = drafter.propose(PARAMS, state)
    assert np.any(proposal.counts)
    assert np.all(state.draft.worth > 0.1) and not np.any(state.draft.rest)


DETERMINISTIC = {
    "prompt lookup": specjax.PromptLookup(4),
    "n-grams": specjax.NGram(3),
    "lookahead": specjax.Lookahead(3, 2, 2, capacity=64),
    "spectra": specjax.Spectra(3, 2, 2, capacity=64),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.exhaustive
def test_drafts_without_chance_leave_the_sampled_tokens_as_they_are(name: str) -> None:
    sampling = Sampling(temperature=0.4, top_p=0.9, repetition_penalty=1.1)
    plain = decode(specjax.Autoregressive(), sampling)
    ours = decode(DETERMINISTIC[name], sampling)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    assert int(ours.stats.accepted.sum()) > 0, "a case that tests nothing"


@pytest.mark.exhaustive
def test_rows_in_a_queue_sample_what_they_sample_alone() -> None:
    options = {
        "max_new_tokens": 10, "sampling": Sampling(temperature=0.7), "stop_tokens": (),
        "drafter": CHOICES["its model"],
    }  # fmt: skip
    keys = jax.random.split(jax.random.key(3), 3)
    together = specjax.decode_many(PARAMS, REPEATED.tolist(), rows=2, key=keys, **options)
    for row, result in enumerate(together):
        alone = specjax.decode(PARAMS, REPEATED[row], key=keys[row : row + 1], **options)
        np.testing.assert_array_equal(result.tokens, alone.tokens[0])


def test_the_default_decodes_every_model() -> None:
    """A 16-bit model has no cheap reading of its weights; its text still drafts."""
    model = random_model(CONFIG)
    plain = specjax.decode(model, REPEATED, max_new_tokens=8, drafter=specjax.Autoregressive())
    np.testing.assert_array_equal(
        specjax.decode(model, REPEATED, max_new_tokens=8).tokens, plain.tokens
    )


@pytest.mark.exhaustive
def test_a_refused_model_is_tried_again() -> None:
    """Its drafts are forgotten in rounds without any, until they promise something again."""
    drafter = CHOICES["its model"]
    state = drafter.init(PARAMS, _state(REPEATED), REPEATED.shape[1])
    refused = state._replace(own=state.own._replace(kept=jnp.zeros(3)))
    kept = []
    for _ in range(100):
        refused = drafter.observe(refused, _verified(rows=3))
        kept.append(float(refused.own.a_round()[0][0]))
    assumed = float(state.own.a_round()[0][0])
    assert kept[0] < 0.1 * assumed and kept[-1] > 0.9 * assumed and kept == sorted(kept)


@pytest.mark.exhaustive
def test_a_round_of_the_model_is_averaged_whole() -> None:
    """A row that drafted learns what the batch's round took; one that did not keeps its own."""
    drafter = specjax.Auto(costs([1, 2, 3, 4], 0.5), specjax.QSpec(7))
    state = drafter.init(PARAMS, _state(REPEATED), REPEATED.shape[1])
    state = state._replace(source=jnp.full(3, 2))
    drafted = jnp.array([3, 1, 0])
    verified = dataclasses.replace(
        _verified(rows=3), drafted=drafted, tested=drafted, accepted=drafted
    )
    for _ in range(200):
        state = drafter.observe(state, verified)
    kept, took = state.own.a_round()
    np.testing.assert_allclose(kept[:2], [3, 1], rtol=1e-3)
    np.testing.assert_allclose(took[:2], 3 * 0.5 + 3, rtol=1e-3)
    np.testing.assert_allclose(kept[2], drafter.init(
        PARAMS, _state(REPEATED), REPEATED.shape[1]).own.a_round()[0][2])  # fmt: skip


def test_a_draft_of_the_model_ends_where_it_is_unsure() -> None:
    """The random model is sure of little, so its drafts are short, unless told otherwise."""
    lengths = []
    for confidence in (None, 0.6, 1e-6):
        drafter = specjax.Auto(OWN, specjax.QSpec(3, confidence=confidence))
        state = start(PARAMS, REPEATED, drafter=drafter, max_new_tokens=8)
        no_text = jnp.full_like(state.draft.rates.kept, 1e-6)
        rates = state.draft.rates._replace(kept=no_text)
        state = dataclasses.replace(state, draft=state.draft._replace(rates=rates))
        proposal, _ = drafter.propose(PARAMS, state)
        lengths.append(np.asarray(proposal.counts).tolist())
    assert lengths[0] == lengths[1] and sum(lengths[0]) < 6
    assert lengths[2] == [3, 3, 3]


@pytest.mark.parametrize(
    ("passes", "longest"), [([1, 1.1, 1.2, 1.4], 7), ([1, 1.2, 2.1, 4.5], 1), ([1, 1, 1.1, 3], 3)]
)
def test_a_draft_of_the_model_is_as_long_as_a_wider_pass_pays(
    passes: list[float], longest: int
) -> None:
    """The drafts are sure to the end: no probability ends them."""
    draft = specjax.QSpec(7, "a8", confidence=1e-30)
    auto = specjax.Auto(costs(passes, 0.1), draft)
    state = start(PARAMS, REPEATED, max_new_tokens=20, drafter=auto)
    no_text = state.draft.rates._replace(kept=jnp.full_like(state.draft.rates.kept, 1e-6))
    state = dataclasses.replace(state, draft=state.draft._replace(rates=no_text))
    proposal, after = auto.propose(PARAMS, state)
    assert proposal.counts.tolist() == [longest] * 3
    assert after.draft.source.tolist() == [2] * 3  # the model


@pytest.mark.parametrize(("passes", "drafted"), [([1, 2 / 1.2, 9, 9], 1), ([1, 9, 9, 8 / 1.2], 0)])
def test_a_draft_that_takes_many_passes_must_promise_more(
    passes: list[float], drafted: int
) -> None:
    """Both promise 1.2 times the tokens of plain decoding, but one loses six passes if it fails."""
    auto = specjax.Auto(costs(passes, 9))
    state = start(PARAMS, REPEATED, max_new_tokens=20, drafter=auto)
    always = state.draft.rates._replace(kept=state.draft.rates.tested)
    state = dataclasses.replace(state, draft=state.draft._replace(rates=always))
    proposal, _ = auto.propose(PARAMS, state)
    assert proposal.counts.tolist() == [drafted] * 3


def test_rows_that_are_ahead_count_less_unless_they_are_replaced() -> None:
    """One row's text promises a draft. The pass is worth it for the row that ends last only."""
    auto = specjax.Auto(costs([1, 1.2, 1.4, 1.8], 9))
    text = np.array([[5, 6, 7, 8] * 4, list(range(10, 26))], np.int32)
    state = start(PARAMS, text, max_new_tokens=20, drafter=auto)

    def drafts(left: list[int], shared: object = None, first_row_gained: int = 20) -> list[int]:
        limits, twenty = state.lengths + jnp.array(left), jnp.full(2, 20)
        stats = dataclasses.replace(
            state.stats, rounds=twenty, generated=jnp.array([first_row_gained, 20])
        )
        now = dataclasses.replace(state, limits=limits, shared=shared, stats=stats)
        proposal, _ = auto.propose(PARAMS, now)
        return (proposal.counts > 0).tolist()

    assert drafts([20, 20]) == drafts([20, 10]) == [True, False]
    assert drafts([10, 20]) == [False, False]
    assert drafts([20, 20], first_row_gained=60) == [False, False]  # so it will end first
    memory = specjax.SuffixMemory.create(CONFIG.vocab_size)
    assert drafts([10, 20], memory) == [True, False]


def test_what_the_text_proposed_is_judged_without_a_draft() -> None:
    drafter = CHOICES["nothing"]
    state = drafter.init(PARAMS, _state(REPEATED), REPEATED.shape[1])
    match = longest_match(jnp.asarray(REPEATED), jnp.full(3, REPEATED.shape[1]), 8, 7)
    longest = jnp.full_like(match.tokens, 3)  # the kind of the longest matches
    state = state._replace(text=Guess(match.tokens, longest, match.counts))
    right = _verified(rows=3, emitted=match.tokens[:, :1], count=1)
    wrong = _verified(rows=3, emitted=match.tokens[:, :1] + 1, count=1)
    rates = [
        np.asarray(after.rates.kept / after.rates.tested)[:, 3]
        for after in (state, drafter.observe(state, right), drafter.observe(state, wrong))
    ]
    assert (rates[2] < rates[0]).all() and (rates[0] < rates[1]).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_match_is_the_longest_and_the_last(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, rng.integers(1, 5, endpoint=True), (3, 40)).astype(np.int32)
    lengths = rng.integers(1, 40, 3, endpoint=True)
    match = longest_match(jnp.asarray(tokens), jnp.asarray(lengths), 4, 5)
    for row, length in enumerate(lengths):
        text = tokens[row, :length].tolist()
        best = (0, 0)
        for end in range(length - 1):
            same = 0
            while same < min(4, end + 1) and text[end - same] == text[length - 1 - same]:
                same += 1
            best = max(best, (same, end))
        follow = text[best[1] + 1 : best[1] + 6] if best[0] else []
        assert int(match.length[row]) == best[0]
        assert match.tokens[row, : int(match.counts[row])].tolist() == follow


@pytest.mark.parametrize("draft", [specjax.QSpec(2, overwrite=False),
                                   specjax.QSpec(2, schedule=specjax.Heuristic()),
                                   specjax.NGram()], ids=repr)  # fmt: skip
def test_a_draft_that_cannot_be_left_out_for_a_round_is_refused(draft: specjax.Drafter) -> None:
    with pytest.raises(ValueError, match="draft of an Auto must draft on the target's KV cache"):
        specjax.Auto(draft=draft)


def _state(tokens: np.ndarray) -> DecodeState:
    return start(PARAMS, tokens, max_new_tokens=4, drafter=specjax.Autoregressive())


def _verified(rows: int, emitted: jax.Array | None = None, count: int = 1) -> Verified:
    zeros = jnp.zeros(rows, jnp.int32)
    tokens = jnp.zeros((rows, 1), jnp.int32) if emitted is None else emitted
    tokens = jnp.pad(tokens, ((0, 0), (0, 8 - tokens.shape[1])))
    return Verified(
        begins=zeros, proposed=tokens, drafted=zeros, accepted=zeros, tested=zeros, emitted=tokens,
        count=zeros + count, logits=None, choices=tokens, finite=tokens > -1, nodes=None,
        distributions=None,
    )  # fmt: skip
