"""Whatever a caller passes, the answer is one sentence: which argument, and what it may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax import planning
from specjax.model.params import Params
from tests.support.random_models import quantized_model, random_model

HUGE = 2**70


@cache
def plain() -> Params:
    return random_model()


@cache
def quantized() -> Params:
    return quantized_model()


def decode(prompt: Any = (1,), **options: Any) -> object:
    return specjax.decode(quantized(), prompt, max_new_tokens=2, **options)


@dataclasses.dataclass(frozen=True)
class Unregistered(specjax.Drafter):
    draft_length: int = 2

    def propose(self, params, state):
        raise AssertionError


@pytest.mark.usefixtures("wrong_types")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: specjax.LayerSkip(5), "layers must be layer numbers, such as (0, 2), got 5"),
        (lambda: specjax.Adaptive("a"), "draft_cost must be a number, got 'a'"),
        (lambda: specjax.Adaptive(memory=None), "memory must be a number, got None"),
        (lambda: specjax.QSpec(schedule=5), "schedule must be a schedule such as"),
        (lambda: specjax.QSpec(schedule=specjax.Heuristic), "schedule must be a schedule such as"),
        (lambda: specjax.QSpec(overwrite="no"), "overwrite must be true or false, got 'no'"),
        (lambda: specjax.QSpec(plain()), "draft_length must be an integer, got Params(llama, "),
        (lambda: specjax.Spectra(parts=3), "parts must be true or false, got 3"),
        (lambda: specjax.Lookahead(seed=2**40), "seed must be an integer from 0 to 4294967295"),
        (lambda: specjax.MultiLevel.of(5), "levels must be at least one drafter, got 5"),
        (lambda: decode(drafter=specjax.MultiLevel(5, 6)), "outer of a MultiLevel must be a draft"),
        (lambda: decode(drafter=specjax.Combined(5, 6)), "first of a Combined must be a drafter"),
        (lambda: decode(drafter=specjax.Auto(draft=5)), "draft of an Auto must be a drafter such"),
        (lambda: decode(drafter=specjax.Auto(draft=specjax.QSpec)), "write QSpec(…)"),
        (lambda: decode(drafter=Unregistered()), "must be a pytree, and Unregistered is none"),
        (lambda: specjax.quantize(None), "params must be what specjax.load returns, got NoneType"),
        (lambda: specjax.quantize(plain(), 5), "method must be one of rtn, "),
        (lambda: specjax.export("tiny", "out"), "params must be what specjax.load returns"),
        (lambda: specjax.save("tiny", "out"), "params must be what specjax.load returns"),
        (lambda: specjax.prepack("tiny"), "params must be what specjax.load returns"),
        (lambda: specjax.parallel.shard("tiny", None), "params must be what specjax.load returns"),
        (lambda: planning.search_layers("tiny", [[1]]), "params must be what specjax.load returns"),
        (lambda: specjax.load(None), "source must be a directory or a model's name, got None"),
        (lambda: specjax.load_tokenizer("tiny").encode(b"abc"), "text must be text in Unicode"),
        (lambda: specjax.load_tokenizer("tiny").encode("\udcff"), "text must be text in Unicode"),
        (lambda: decode([HUGE]), "a token of prompt row 0 must be an integer of at most 64 bits"),
        (lambda: decode(HUGE), "prompt must be token ids (an array or lists), got 1180"),
        (lambda: decode(b"abc"), "prompt must be token ids (an array or lists), got b'abc'"),
        (lambda: decode(memoryview(b"abc")), "prompt must be token ids (an array or lists)"),
        (lambda: decode([b"abc"]), "prompt row 0 must be a list of token ids, got b'abc'"),
        (
            lambda: decode(np.ones((1, 2), int), prompt_lengths=[HUGE]),
            "prompt_lengths must hold one integer per prompt",
        ),
        (lambda: decode(cache_capacity=HUGE), "cache_capacity must be an integer of at most 64"),
        (lambda: specjax.stream(quantized(), b"abc"), "prompt must be a list of token ids, got b'"),
        (lambda: specjax.drafting.make(5), "the name of a drafter must be a text, got 5"),
        (lambda: specjax.drafting.make("ngram", ngram="9" * 5000), "must be an integer, got '99"),
    ],
)
def test_one_sentence(call: Callable[[], object], message: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refusal:
        call()
    text = str(refusal.value)
    assert message in text and "\n" not in text and len(text) < 300
    assert not list(tmp_path.iterdir())


def test_a_model_is_one_line() -> None:
    assert repr(plain()) == "Params(llama, 0.1 million parameters, float32, 0.5 MB)"
    assert repr(quantized()) == "Params(llama, 0.1 million parameters, Int4Weight, 0.2 MB)"
    shapes = jax.eval_shape(lambda: quantized())
    assert repr(shapes).startswith("Params(llama, 0.1 million parameters, Int4Weight, ")
    assert repr(jax.tree.map(lambda _: None, plain())).endswith("float32, 0.0 MB)")
