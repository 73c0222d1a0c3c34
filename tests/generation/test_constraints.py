"""Outputs that keep to a grammar: complete ones are valid, and drafts change none of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest

import specjax
from benchmarks.support.schemas import SCHEMAS
from specjax import Constraint
from specjax.drafting import registry
from specjax.generation.guided import depth_first
from tests.support.covering import representatives
from tests.support.drafter_types import types_of
from tests.support.tree_drafter import TreeDrafter

PARAMS = specjax.load("tiny")
TOKENIZER = specjax.load_tokenizer("tiny")
PROMPT = TOKENIZER.encode("Once upon a time")
SAMPLING = specjax.Sampling(temperature=1.3)
STORE = specjax.Datastore.create([np.array(PROMPT)], PARAMS.config.vocab_size)
FEW = ("an object", "unicode", "either", "calls", "an array", "mixed choices")
DRAFTERS: dict[str, specjax.Drafter] = {
    "plain": specjax.Autoregressive(),
    "Auto": specjax.Auto(),
    "QSpec": specjax.QSpec(2),
    "ANPD": specjax.NGram(3),
    "a tree": TreeDrafter(PARAMS, (2, 1), aside=True),
    "Lookahead": specjax.Lookahead(window=2, guesses=2),
    "another model's cache": specjax.DraftModel(PARAMS, 2),
    "two levels": specjax.MultiLevel(specjax.QSpec(3), specjax.NGram(2)),
    "skipping": specjax.LayerSkip((0, 1), 2),
    "a tree of a draft": specjax.DraftTree(specjax.QSpec(2), width=2, nodes=4),
    "prompt lookup": specjax.PromptLookup(3),
    "token recycling": specjax.TokenRecycling(5, 3),
    "spectra and a corpus": specjax.Combined(
        specjax.Spectra(3, 2, 2, capacity=64), specjax.Retrieval(STORE, depth=3), extra=4
    ),
}
KINDS = ("a tree",)


def _constraint(name: str, drafts: bool) -> Constraint:
    made = Constraint.json_schema(SCHEMAS[name], TOKENIZER)
    return dataclasses.replace(made, drafts=drafts)


@functools.cache
def _outputs(
    drafter: str, names: tuple[str, ...], drawn: bool, drafts: bool = True
) -> list[specjax.Generation]:
    options: dict[str, Any] = {}
    if drawn:
        options = {"sampling": SAMPLING, "key": jax.random.key(3)}
    return specjax.generate(
        PARAMS, TOKENIZER, ["Once upon a time"] * len(names), rows=4, max_new_tokens=64,
        drafter=DRAFTERS[drafter], constraint=[_constraint(name, drafts) for name in names],
        **options,
    )  # fmt: skip


def _plain(names: tuple[str, ...], drawn: bool) -> list[specjax.Generation]:
    """The outputs without any draft."""
    return _outputs("plain", names, drawn, drafts=False)


def _assert_valid(names: tuple[str, ...], outputs: list[specjax.Generation]) -> int:
    """Returns how many outputs are complete; all of those are valid."""
    complete = 0
    for name, output in zip(names, outputs, strict=True):
        assert output.error is None
        assert output.finish == ("stop" if output.tokens[-1] == 0 else "length"), output.text
        if output.finish == "stop":
            jsonschema.validate(json.loads(output.text), SCHEMAS[name])
            complete += 1
    return complete


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(SCHEMAS), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("drawn", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_complete_outputs_are_valid(names: tuple[str, ...], drawn: bool) -> None:
    outputs = _plain(names, drawn)
    assert sum(int(each.stats.drafted) for each in outputs) == 0
    assert _assert_valid(names, outputs) > len(names) / 2


@pytest.mark.parametrize("drafter", representatives(DRAFTERS, *KINDS))
@pytest.mark.parametrize("drawn", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_drafts_change_no_output(drafter: str, drawn: bool) -> None:
    outputs = _outputs(drafter, FEW, drawn)
    for output, plain in zip(outputs, _plain(FEW, drawn), strict=True):
        np.testing.assert_array_equal(output.tokens, plain.tokens)
    assert sum(int(each.stats.accepted) for each in outputs) > 0


def test_every_drafter_is_among_them() -> None:
    """But the one between two tokenizers: it drafts as another model does."""
    found = set().union(*map(types_of, DRAFTERS.values()))
    assert {*registry.DRAFTERS.values()} - found == {specjax.TranslatedDraft}


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", ["QSpec", *KINDS])
@pytest.mark.parametrize("drawn", [True, False])
def test_drafts_change_no_output_of_any_schema(drafter: str, drawn: bool) -> None:
    names = tuple(SCHEMAS)
    for output, plain in zip(_outputs(drafter, names, drawn), _plain(names, drawn), strict=True):
        np.testing.assert_array_equal(output.tokens, plain.tokens)


def test_forced_tokens_save_rounds() -> None:
    forced, plain = _outputs("plain", FEW, True), _plain(FEW, True)
    for output, slow in zip(forced, plain, strict=True):
        np.testing.assert_array_equal(output.tokens, slow.tokens)
    rounds = [sum(int(each.stats.rounds) for each in outputs) for outputs in (forced, plain)]
    assert rounds[0] < 0.9 * rounds[1]


@pytest.mark.exhaustive
def test_a_stream_and_a_queue_are_the_same() -> None:
    """A free row beside them is as it is alone."""
    constraint = _constraint("calls", drafts=True)
    drawn: dict[str, Any] = {"sampling": SAMPLING, "max_new_tokens": 64}
    keys = jax.random.split(jax.random.key(5), 2)
    one, free = specjax.decode_many(
        PARAMS, [PROMPT, PROMPT], rows=4, constraint=[constraint, None], key=keys,
        drafter=DRAFTERS["ANPD"], **drawn,
    )  # fmt: skip
    rounds = specjax.stream(
        PARAMS, PROMPT, constraint=constraint, key=keys[:1], drafter=DRAFTERS["ANPD"], **drawn
    )
    tokens = [token for each in rounds for token in each.tokens]
    assert tokens == one.tokens[len(PROMPT) :].tolist()
    alone = specjax.decode(PARAMS, PROMPT, key=keys[1:], drafter=DRAFTERS["ANPD"], **drawn)
    np.testing.assert_array_equal(free.tokens, alone.tokens[0, : len(free.tokens)])


@pytest.mark.parametrize(
    ("made", "pattern", "cut"),
    [
        (lambda: Constraint.regex("[a-f]{3}-(yes|no)", TOKENIZER), "[a-f]{3}-(yes|no)", None),
        (
            lambda: Constraint.lark('start: item (", " item)*\nitem: /[0-9]/', TOKENIZER),
            "[0-9](, [0-9])*", "(, ?)?",
        ),
    ],
    ids=["regex", "lark"],
)  # fmt: skip
@pytest.mark.exhaustive
def test_other_grammars(made: Any, pattern: str, cut: str | None) -> None:
    """cut: what an output that is cut may end with; None: it is too short for that."""
    output = specjax.generate(
        PARAMS, TOKENIZER, "Once upon a time", constraint=made(), max_new_tokens=64, rows=4,
        drafter=DRAFTERS["plain"],
    )  # fmt: skip
    if output.finish == "length":
        assert cut is not None
        pattern += cut
    assert re.fullmatch(pattern, output.text)


def test_a_stop_token_that_is_text_ends_complete_outputs_alone() -> None:
    (letter,) = TOKENIZER.encode("b", special_tokens=False)
    guide = Constraint.regex("a[abc]", TOKENIZER).guide(PARAMS.config.vocab_size, (letter,))
    (first,) = TOKENIZER.encode("a", special_tokens=False)
    masks = np.full((3, PARAMS.config.vocab_size // 32), ~np.uint32(0))
    guide.allow([first, first], [(0, 0), (1, 1)], masks)
    allowed = [np.unpackbits(mask.view(np.uint8), bitorder="little")[letter] for mask in masks]
    assert allowed == [0, 0, 1]


def test_an_output_that_ends_too_early_says_so() -> None:
    output = specjax.generate(
        PARAMS, TOKENIZER, "Once upon a time", constraint=_constraint("a call", drafts=True),
        max_new_tokens=4, rows=4, drafter=DRAFTERS["plain"],
    )  # fmt: skip
    assert output.finish == "length"
    assert output.text.startswith('{"name":')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constraint.json_schema({"type": "foo"}, TOKENIZER), "Invalid type: foo"),
        (lambda: Constraint.json_schema("{", TOKENIZER), "must be a JSON object"),
        (lambda: Constraint.json_schema(3, TOKENIZER), "a mapping or a text, got 3"),
        (lambda: Constraint.json_schema({"a": {1}}, TOKENIZER), "must hold JSON values"),
        (lambda: Constraint.json_schema({"not": {}}, TOKENIZER), "Unimplemented keys"),
        (lambda: Constraint.regex("(a", TOKENIZER), "error: unclosed group"),
        (lambda: Constraint.regex("", TOKENIZER), "that is not empty"),
        (lambda: Constraint.regex("a" * 2**21, TOKENIZER), "at most 1048576 characters"),
        (lambda: Constraint.lark("start: x (", TOKENIZER), "the grammar is refused"),
        (lambda: Constraint.regex("a", None), "what specjax.load_tokenizer returns"),
    ],
)
def test_a_bad_grammar_is_one_sentence(make: Any, message: str, wrong_types: None) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("constraint", "options", "message"),
    [
        ("{}", {}, "constraint must be what specjax.Constraint"),
        ([None, None], {}, "one or None per prompt, 1, got 2"),
        (Constraint.regex("a", TOKENIZER), {"stop_tokens": ()}, "needs a stop token"),
    ],
)
def test_a_constraint_that_does_not_fit(
    constraint: Any, options: dict[str, Any], message: str, wrong_types: None
) -> None:
    with pytest.raises(ValueError, match=message):
        specjax.decode_many(PARAMS, [PROMPT], constraint=constraint, **options)


@pytest.mark.exhaustive
def test_a_grammar_that_needs_too_much_ends_its_row_alone() -> None:
    """Every x can be read in many ways; the row beside it goes on."""
    kinds = range(150)
    rules = "\n".join(f'a{kind}: a{kind} a{kind} | "x"' for kind in kinds)
    ambiguous = f'start: a "y"\na: {" | ".join(f"a{kind}" for kind in kinds)}\n{rules}'
    (end,) = TOKENIZER.encode("y", special_tokens=False)
    lost, kept = specjax.decode_many(
        PARAMS, [PROMPT, PROMPT], rows=4, max_new_tokens=64, drafter=DRAFTERS["plain"],
        constraint=[Constraint.lark(ambiguous, TOKENIZER), _constraint("choices", drafts=True)],
        sampling=specjax.Sampling(top_k=1, logit_bias={end: -100}), key=jax.random.key(0),
    )  # fmt: skip
    assert re.match("the grammar cannot be followed: .* max is 2000", lost.error)
    assert set(TOKENIZER.decode(lost.tokens[len(PROMPT) :])) == {"x"}
    assert kept.error is None
    json.loads(TOKENIZER.decode(kept.tokens[len(PROMPT) :]))


def test_nodes_of_a_tree_come_before_their_descendants() -> None:
    parents = np.array([-1, -1, 0, 0, 1, 2])
    assert depth_first(parents, range(6)) == [(0, 0), (2, 1), (5, 2), (3, 1), (1, 0), (4, 1)]
    assert depth_first(parents, [1, 2, 4, 5]) == [(1, 0), (4, 1)]
