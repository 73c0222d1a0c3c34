"""Drafters by name: every drafter can be made, and every field set, from text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.drafting import make, options
from specjax.drafting.registry import DRAFTERS, SCHEDULES
from tests.support.random_models import CONFIG, random_model
from tests.support.small_tokenizers import OTHER, TINY

TARGET = random_model(dataclasses.replace(CONFIG, num_layers=1))
STORE = specjax.Datastore.create([np.arange(9)], CONFIG.vocab_size)

REQUIRED: dict[str, dict[str, Any]] = {
    "draft-model": {"params": TARGET},
    "translated-draft": {"params": TARGET, "draft_tokenizer": OTHER, "target_tokenizer": TINY},
    "layer-skip": {"layers": (0, 2)},
    "retrieval": {"datastore": STORE},
    "combined": {"first": specjax.Spectra(), "second": specjax.NGram()},
    "multi-level": {"outer": specjax.QSpec(), "inner": specjax.NGram()},
}

# By type: text that is not the default, and what it means.
TEXTS: dict[str, tuple[str, object]] = {
    "an integer": ("12", 12),
    "a number": ("1", 1.0),
    "true or false": ("false", False),
    "one of a16, a8, a4": ("a4", "a4"),
    "integers with commas between them": ("1,3,4", (1, 3, 4)),
    "a number or none": ("0.5", 0.5),
    "an integer or none": ("64", 64),
    "a schedule (heuristic, adaptive) or none": ("heuristic", specjax.Heuristic()),
}
NAMED: dict[tuple[str, str], tuple[str, object]] = {
    ("auto", "draft"): ("qspec:draft_length=2", specjax.QSpec(2)),
    ("draft-model", "share_cache"): ("true", True),
    ("draft-tree", "draft"): ("qspec:draft_length=8", specjax.QSpec(8)),
    ("prompt-lookup", "whole"): ("true", True),
    ("prompt-lookup", "shortest"): ("2", 2),
    ("lookahead", "capacity"): ("96", 96),
    ("spectra", "capacity"): ("96", 96),
    ("spectra", "budget"): ("guesses", "guesses"),
    ("combined", "first"): ("lookahead:window=2", specjax.Lookahead(window=2)),
    ("combined", "second"): ("prompt-lookup", specjax.PromptLookup()),
    ("multi-level", "outer"): ("qspec:activation=a4", specjax.QSpec(activation="a4")),
    ("multi-level", "inner"): ("spectra", specjax.Spectra()),
}
OBJECTS = {"costs", "params", "draft_tokenizer", "target_tokenizer", "datastore", "memory"}
FIELDS = [(name, field) for name in DRAFTERS for field in options(name) if field not in OBJECTS]


def made(name: str, **given: object) -> Any:
    return make(name, **REQUIRED.get(name, {}) | given)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_has_a_name(name: str) -> None:
    drafter = made(name)
    assert type(drafter) is DRAFTERS[name] and isinstance(drafter, specjax.Drafter)
    again = type(drafter)(**REQUIRED.get(name, {}))
    assert jax.tree.structure(drafter) == jax.tree.structure(again)


def test_a_preset_has_its_own_defaults() -> None:
    paper = specjax.Spectra.paper(window=7)
    assert make("spectra-paper:window=7") == paper != make("spectra:window=7")
    assert options("spectra-paper")["text"].default is False
    assert options("spectra-paper").keys() == options("spectra").keys()
    assert make("spectra-paper", ngram="3").backward_length == 2


def test_every_public_drafter_has_a_name() -> None:
    public = {getattr(specjax, name) for name in specjax.__all__ if name != "planning"}
    drafters = {cls for cls in public if isinstance(cls, type) and hasattr(cls, "propose")}
    assert drafters - {specjax.Drafter} == {*DRAFTERS.values()}
    assert {specjax.Heuristic, specjax.Adaptive} == {*SCHEDULES.values()}


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_field_can_be_set_by_text_and_by_value(name: str, field: str) -> None:
    option = options(name)[field]
    text, value = NAMED.get((name, field)) or TEXTS[option.accepts]
    if (name, field) == ("qspec", "activation"):
        assert option.default == "a8"
    for drafter in (made(name, **{field: text}), made(name, **{field: value})):
        assert getattr(drafter, field) == value != option.default
        assert type(getattr(drafter, field)) is type(value)
    inside = REQUIRED.get(name, {}).keys() - {field}
    if not inside:
        assert getattr(make(f"{name}:{field}={text}"), field) == value


@pytest.mark.parametrize("field", ["schedule", "confidence", "capacity"])
def test_none_is_text_too(field: str) -> None:
    assert getattr(made("translated-draft", **{field: "none"}), field) is None


def test_schedules_take_options() -> None:
    expected = specjax.Adaptive(draft_cost=0.2, row_cost=0.01, memory=8.0)
    text = "adaptive:draft_cost=0.2,row_cost=0.01,memory=8"
    assert make("qspec", schedule=text) == specjax.QSpec(schedule=expected)
    whole = f"qspec:schedule=({text}),draft_length=5"
    assert make(whole) == specjax.QSpec(draft_length=5, schedule=expected)


def test_options_may_follow_the_name() -> None:
    drafter = make("layer-skip:layers=0,2,4,draft_length=2,confidence=0.5", draft_length=6)
    assert drafter == specjax.LayerSkip((0, 2, 4), draft_length=6, confidence=0.5)
    nested = "multi-level:outer=(multi-level:outer=qspec,inner=ngram),inner=(ngram:ngram=4)"
    with pytest.raises(ValueError, match="outer must draft with a model"):
        make(nested)
    combined = make("combined:first=(spectra:window=2,guesses=3),second=ngram,extra=4")
    core = specjax.Spectra(window=2, guesses=3)
    assert combined == specjax.Combined(core, specjax.NGram(), extra=4)


def test_a_datastore_may_be_a_directory(tmp_path: Path) -> None:
    STORE.save(tmp_path / "store")
    drafter = make("retrieval", datastore=str(tmp_path / "store"), nodes="8")
    assert isinstance(drafter, specjax.Retrieval) and drafter.nodes == 8
    np.testing.assert_array_equal(drafter.datastore.tokens, STORE.tokens)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("qspecs", {}, "drafter must be one of auto, autoregressive, qspec, .*, got 'qspecs'"),
        ("ngram", {"window": 3}, "ngram takes draft_length, ngram; got 'window'"),
        ("autoregressive", {"draft_length": 1}, "autoregressive takes no options; got 'draft_len"),
        ("layer-skip", {}, "layer-skip needs layers$"),
        ("combined", {}, "combined needs first and second$"),
        ("ngram", {"ngram": "three"}, "ngram of ngram must be an integer, got 'three'"),
        ("ngram", {"ngram": "2.5"}, "ngram of ngram must be an integer, got '2.5'"),
        ("spectra", {"refine": "x"}, "refine of spectra must be a number, got 'x'"),
        ("spectra", {"text": "maybe"}, "text of spectra must be true or false, got 'maybe'"),
        ("qspec", {"activation": "a3"}, "activation of qspec must be one of a16, a8, a4, got 'a3'"),
        ("layer-skip", {"layers": "0;2"}, "layers of layer-skip must be integers with commas"),
        ("qspec", {"schedule": "x"}, "schedule must be one of heuristic, adaptive, got 'x'"),
        ("qspec", {"schedule": "adaptive:x=1"}, "adaptive takes draft_cost, .*; got 'x'"),
        ("draft-model", {"params": "tiny"}, "params of draft-model must be what specjax.load ret"),
        ("retrieval", {"datastore": "nowhere"}, "nowhere is not a datastore"),
        ("ngram:4", {}, "options of ngram must be written option=value, got '4'"),
        ("ngram", {"ngram": "1"}, "ngram must be at least 2, got 1"),
    ],
)  # fmt: skip
def test_errors_say_what_is_accepted(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make(name, **given)
    assert "\n" not in str(caught.value)


def test_options_can_be_listed() -> None:
    listed = options("translated-draft")
    assert [*listed] == [field.name for field in dataclasses.fields(specjax.TranslatedDraft)]
    assert listed["params"].required and not listed["capacity"].required
    assert listed["draft_length"].default == 5
    assert [*options("adaptive")] == ["draft_cost", "row_cost", "memory"]
    for name in DRAFTERS:
        assert all(re.fullmatch(r"[\w ,().]+", each.accepts) for each in options(name).values())
