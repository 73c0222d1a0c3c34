"""Clients that others wrote: lm-evaluation-harness's, and a fuzzer of the OpenAPI description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from schemathesis import GenerationMode

import specjax
from specjax.evaluation.likelihood import log_likelihoods

PAIRS = [
    ("Once upon a time", ", and then the door"), ("The boy said", ","),
    ("The king went to the", " forest and to the sea"), ("def add(a, b):", " return"),
]  # fmt: skip


@pytest.fixture
def harness(live, tokenizer, tmp_path: Path) -> Any:
    tokenizer.save(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions", model="tiny", tokenizer=str(tmp_path),
        tokenizer_backend="huggingface", batch_size=2, max_length=256,
    )  # fmt: skip


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.mark.exhaustive
def test_lm_evals_local_completions_scores_texts(params, tokenizer, harness) -> None:
    found = harness.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    pairs = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in PAIRS]
    expected = log_likelihoods(params, pairs)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-4)
    assert [bool(x) for _, x in found] == [x for _, x in expected]
    assert {x for _, x in expected} == {True, False}


@pytest.mark.exhaustive
def test_lm_evals_local_completions_generates(params, tokenizer, harness) -> None:
    arguments = [(text, {"until": ["."], "max_gen_toks": 20}) for text, _ in PAIRS]
    found = harness.generate_until(instances("generate_until", arguments), disable_tqdm=True)
    texts = [text for text, _ in PAIRS]
    alone = specjax.generate(params, tokenizer, texts, max_new_tokens=20, stop=["."])
    assert found == [each.text for each in alone]


@pytest.fixture(scope="module")
def operations(live) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_a_fuzzer_finds_no_server_error(live, operations, mode) -> None:
    assert len(operations) == 6

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def call(data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(operations))
        try:
            strategy = operation.as_strategy(generation_mode=mode)
        except Unsatisfiable:
            return
        answer = data.draw(strategy).call(base_url=live.url)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    call()
    assert httpx.get(f"{live.url}/health").status_code == 200
