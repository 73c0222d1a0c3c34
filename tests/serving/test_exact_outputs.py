"""An output is that of `specjax.generate` alone, whatever else the server does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import openai
import pytest

import specjax
from specjax.drafting.costs import Costs
from tests.serving.conftest import PLAN, client_of
from tests.support.live_server import TOKENS, Live, live_server, metrics, sampling_of

pytestmark = pytest.mark.recompiled
NEW, PLAIN = 16, specjax.Autoregressive()
TEXTS = [
    "Once upon a time", "The king said to his son", "def add(a, b):", "In the forest there was",
    "The doctor went home. " * 30, "The doctor went home. " * 30 + "Then", "A", "Two dogs",
]  # fmt: skip
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1.2},
    {"temperature": 0.9, "min_p": 0.02, "top_k": 50, "top_p": 0.95},
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": -0.3},
    {
        "temperature": 0.8, "presence_penalty": 1.5, "repetition_penalty": 1.3,
        "logit_bias": {"300": 4.5, "17": -100, "262": 2},
    },
]  # fmt: skip


class Case(NamedTuple):
    """A request, and the text that `generate` gives for it alone."""

    text: str
    seed: int
    fields: dict[str, Any]
    expected: str

    def ask(self, client: openai.OpenAI, **more: Any) -> Any:
        extensions = ("top_k", "min_p", "repetition_penalty")
        own = {name: x for name, x in self.fields.items() if name in extensions}
        usual = {name: x for name, x in self.fields.items() if name not in own}
        return client.completions.create(
            model="tiny", prompt=self.text, max_tokens=NEW, seed=self.seed, extra_body=own,
            **usual, **more,
        )  # fmt: skip


@pytest.fixture(scope="module")
def cases(params, tokenizer) -> list[Case]:
    return cases_of(SAMPLINGS[::2], params, tokenizer)


@pytest.fixture(scope="module")
def all_cases(cases, params, tokenizer) -> list[Case]:
    return cases + cases_of(SAMPLINGS[1::2], params, tokenizer)


def cases_of(samplings: list[dict[str, Any]], params: Any, tokenizer: Any) -> list[Case]:
    """One row: every text is decoded by itself, without drafts."""
    seeds = [7919 * number for number in range(len(TEXTS))]
    keys = jax.numpy.stack([jax.random.fold_in(jax.random.key(seed), 0) for seed in seeds])
    made = []
    for fields in samplings:
        sampling = sampling_of(fields)
        drawn = {} if sampling is None else {"sampling": sampling, "key": keys}
        alone = specjax.generate(
            params, tokenizer, TEXTS, max_new_tokens=NEW, rows=1, drafter=PLAIN, **drawn
        )
        texts = [each.text for each in alone]
        made += [Case(*each, fields, text) for *each, text in zip(TEXTS, seeds, texts, strict=True)]
    return made


def run_crowd(live: Live, client: openai.OpenAI, cases: list[Case], count: int) -> list[str]:
    """Asks from 16 clients at a time, some of whom leave early. Returns the texts that differ."""
    chosen = random.Random(0).choices(cases, k=count)

    def one(number: int, case: Case) -> str | None:
        if number % 5 == 4:
            with case.ask(client, stream=True) as stream:
                next(iter(stream))
            return None
        if number % 2:
            found = "".join(each.choices[0].text for each in case.ask(client, stream=True))
        else:
            found = case.ask(client).choices[0].text
        return None if found == case.expected else found

    with ThreadPoolExecutor(16) as pool:
        return [x for x in pool.map(one, range(count), chosen) if x is not None]


def wait_until_free(live: Live) -> None:
    for _ in range(200):
        if not live.engine.open and not live.engine.running:
            return
        time.sleep(0.05)
    pytest.fail(f"{live.engine.open} outputs and {live.engine.running} rows are still in use")


def test_a_crowd_gets_what_each_would_get_alone(live, client, cases) -> None:
    assert run_crowd(live, client, cases, 30) == []
    wait_until_free(live)
    assert live.engine.prefixes is not None and live.engine.prefixes.found > 0


@pytest.mark.exhaustive
def test_hundreds_of_short_responses(live, client, all_cases) -> None:
    assert run_crowd(live, client, all_cases, 400) == []
    wait_until_free(live)


@pytest.mark.exhaustive
def test_the_usual_drafter_changes_no_output(params, tokenizer, all_cases) -> None:
    """Its drafts cost next to nothing, so that it drafts where a guess may be right."""
    drafter = specjax.Auto(Costs(np.ones(4, np.float32), np.float32(0.01)))
    with live_server(params, tokenizer, plan=PLAN, drafter=drafter) as live:
        with client_of(live) as client:
            assert run_crowd(live, client, all_cases, 80) == []
        wait_until_free(live)
        assert metrics(live)["specjax:spec_decode_num_accepted_tokens_total"] > 0


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The threads that compile, but for the engine's own compiler."""
    compiled: list[str] = []

    def hear(event: str, *_: Any, **__: Any) -> None:
        thread = threading.current_thread().name
        if event == "/jax/core/compile/backend_compile_duration" and thread != "specjax-compiler":
            compiled.append(thread)

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(hear)


@pytest.mark.exhaustive
def test_no_request_waits_for_a_compilation(live, client, all_cases, compiled) -> None:
    """The engine compiles in a thread of its own while it serves."""
    for case in all_cases:
        case.ask(client)
    client.completions.create(
        model="tiny", prompt=list(range(5, 200)), max_tokens=9, logprobs=2, n=3, stop=[" the", "a"],
        extra_body={"stop_token_ids": [9]},
    )  # fmt: skip
    client.completions.create(model="tiny", prompt="A", max_tokens=150, temperature=0, echo=True)
    with all_cases[1].ask(client, stream=True) as stream:
        next(iter(stream))
    wait_until_free(live)
    assert compiled == []
    jax.jit(lambda x: x * 3 + 41)(np.arange(3))
    assert compiled, "the listener hears nothing"


def test_several_outputs_are_generates_samples(params, tokenizer, client) -> None:
    sampling = specjax.Sampling(temperature=1.2)
    texts = TEXTS[4:6]
    expected = specjax.generate(
        params, tokenizer, texts, max_new_tokens=NEW, samples=3, sampling=sampling,
        key=jax.random.key(5), stop=[" and"], rows=1, drafter=PLAIN,
    )  # fmt: skip
    found = client.completions.create(
        model="tiny", prompt=texts, n=3, seed=5, temperature=1.2, max_tokens=NEW, stop=" and"
    )
    assert [each.index for each in found.choices] == list(range(6))
    samples = [each for one in expected for each in one]
    assert [each.text for each in found.choices] == [each.text for each in samples]
    assert [each.finish_reason for each in found.choices] == [each.finish for each in samples]
    assert found.usage.completion_tokens == sum(len(each.tokens) for each in samples)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_plain_decoding(params, tokenizer, client, stream) -> None:
    sampling, key = specjax.Sampling(temperature=0.9), jax.random.key(3)
    expected = specjax.generate(
        params, tokenizer, TEXTS[0], max_new_tokens=NEW, sampling=sampling, key=key, logprobs=5,
        drafter=PLAIN,
    ).logprobs  # fmt: skip
    found = client.completions.create(
        model="tiny", prompt=TEXTS[0], seed=3, temperature=0.9, max_tokens=NEW, logprobs=4,
        stream=stream,
    )  # fmt: skip
    parts = [each.choices[0].logprobs for each in found] if stream else [found.choices[0].logprobs]
    values = [x for part in parts if part for x in part.token_logprobs]
    np.testing.assert_array_equal(np.float32(values), expected.tokens)
    top = [x for part in parts if part for x in part.top_logprobs]
    assert [max(each.values()) for each in top] == expected.top_logprobs[:, 0].tolist()


def test_a_prompts_logprobs_are_those_of_generating_it(tokenizer, client) -> None:
    """The longer prompt takes several chunks to read; its second half was generated before."""
    begin = tokenizer.encode(TEXTS[4])[:60]
    options = {"model": "tiny", "temperature": 0, "logprobs": 3}
    made = client.completions.create(prompt=begin, max_tokens=90, **options).choices[0].logprobs
    ids = [*begin, *tokens_of(tokenizer, made.tokens)]
    found = client.completions.create(prompt=ids, max_tokens=1, echo=True, **options).choices[0]
    scored = found.logprobs
    assert len(scored.tokens) == len(ids) + 1 and scored.token_logprobs[0] is None
    assert scored.token_logprobs[60:-1] == made.token_logprobs
    assert scored.top_logprobs[60:-1] == made.top_logprobs
    assert found.text.startswith(tokenizer.decode(ids))
    assert found.text[scored.text_offset[7] :].startswith(scored.tokens[7])


def tokens_of(tokenizer: Any, texts: list[str]) -> list[int]:
    """The ids of tokens, by their texts."""
    known = {each: number for number, each in enumerate(tokenizer.vocabulary())}
    return [known[text.encode()] for text in texts]


def test_what_requests_have_in_common_is_read_once(params, tokenizer, live, client) -> None:
    """Prompts that begin alike, and a turn behind an output, get what they get alone."""
    encode, before = tokenizer.encode, live.engine.prefixes.found

    def ask(prompt: list[int], new: int) -> list[int]:
        found = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=new, temperature=0, logprobs=0
        )
        return tokens_of(tokenizer, found.choices[0].logprobs.tokens)

    begin = encode("The old woman went to the market and bought a hen. " * 12)[:140]
    turn = [*begin[40:100], *ask(begin[40:100], 80)]
    assert len(turn) == 140
    for prompt in (
        [*begin, *encode(" Then")], [*begin, *encode(" But")], [*turn, *encode(" Then")]
    ):  # fmt: skip
        alone = specjax.decode(params, prompt, max_new_tokens=NEW, drafter=PLAIN)
        assert ask(prompt, NEW) == alone.tokens[0, len(prompt) :].tolist()
    assert live.engine.prefixes.found - before == 128 + 128


def test_a_row_is_free_as_soon_as_its_client_goes(live, client) -> None:
    """More long outputs than rows; clients leave, in a row, in the queue or while reading."""
    before = metrics(live)[TOKENS]

    def gives_up(number: int) -> bool:
        try:
            client.completions.create(
                model="tiny", prompt=f"{number} " + TEXTS[4], max_tokens=100, timeout=0.05
            )
        except openai.APITimeoutError:
            return True
        return False

    with ThreadPoolExecutor(12) as pool:
        gone = sum(pool.map(gives_up, range(12)))
    assert gone > 4, "a machine that outruns the clients"
    wait_until_free(live)
    assert metrics(live)[TOKENS] - before < 12 * 100 - gone * 25
    case = client.completions.create(model="tiny", prompt="A", max_tokens=4, temperature=0)
    assert case.choices[0].text
