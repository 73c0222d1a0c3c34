"""Drafters and schedules by name, for command lines and configuration files.

    make("spectra", window=2, guesses=2)
    make("qspec:draft_length=5,schedule=(adaptive:draft_cost=0.2,memory=32)")

The options of a drafter are the fields of its dataclass. Text is converted by the field's
annotation, so a new field can be set everywhere as soon as it exists.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from specjax.checks import check_text, shown
from specjax.drafting.auto import Auto
from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.chain import LevelDrafter
from specjax.drafting.combined import Combined
from specjax.drafting.costs import Costs
from specjax.drafting.datastore import Datastore
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.draft_tree import DraftTree
from specjax.drafting.layer_skip import LayerSkip
from specjax.drafting.lookahead import Lookahead
from specjax.drafting.multilevel import MultiLevel
from specjax.drafting.ngram import NGram
from specjax.drafting.prompt_lookup import PromptLookup
from specjax.drafting.qspec import QSpec
from specjax.drafting.retokenize import TextTokenizer
from specjax.drafting.retrieval import Retrieval
from specjax.drafting.schedules import Adaptive, Heuristic, Schedule
from specjax.drafting.spectra import Spectra
from specjax.drafting.suffix_memory import SuffixMemory
from specjax.drafting.token_recycling import TokenRecycling
from specjax.drafting.translated import TranslatedDraft
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter

DRAFTERS: Mapping[str, type[Drafter]] = {
    "auto": Auto,
    "autoregressive": Autoregressive,
    "qspec": QSpec,
    "draft-model": DraftModel,
    "translated-draft": TranslatedDraft,
    "layer-skip": LayerSkip,
    "draft-tree": DraftTree,
    "prompt-lookup": PromptLookup,
    "ngram": NGram,
    "lookahead": Lookahead,
    "spectra": Spectra,
    "token-recycling": TokenRecycling,
    "retrieval": Retrieval,
    "combined": Combined,
    "multi-level": MultiLevel,
}
# Drafters with a paper's choices where those of the class are others.
PRESETS: Mapping[str, Callable[..., Drafter]] = {"spectra-paper": Spectra.paper}
NAMES: Mapping[str, Callable[..., Drafter]] = {**DRAFTERS, **PRESETS}
SCHEDULES: Mapping[str, type[Schedule]] = {"heuristic": Heuristic, "adaptive": Adaptive}


class Option(NamedTuple):
    """A field of a drafter or schedule.

    annotation: its type.
    accepts: the same in words.
    default: `dataclasses.MISSING` where it must be given.
    """

    annotation: Any
    accepts: str
    default: Any

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def make(name: str, **options: object) -> Drafter:
    """Makes the drafter of that name.

    Args:
      name: a key of `NAMES`, which options may follow: "spectra:window=2,guesses=2". Parentheses
        keep the options of a drafter or schedule inside together.
      options: fields of the drafter, as objects or as text: "2", "0.1", "true", "none", "0,2,4".
        `schedule` may be the name of a schedule, `datastore` and `memory` directories. The drafters
        inside a "combined" or a "multi-level" may be named as `name` is. Models and tokenizers are
        objects.

    Returns:
      The drafter.

    Raises:
      ValueError: the name or an option is unknown, an option is missing, or a value is not
      accepted.
    """
    drafter: Drafter = _make(NAMES, "drafter", name, options)
    return drafter


def options(name: str) -> dict[str, Option]:
    """The options that `make` takes for a drafter, or "heuristic" and "adaptive", in order.

    Raises ValueError if the name is unknown.
    """
    return _options(_find({**NAMES, **SCHEDULES}, "drafter", name))


def _make(
    table: Mapping[str, Callable[..., Any]], kind: str, text: str, given: dict[str, object]
) -> Any:
    """An object of one of the classes or presets in `table`."""
    name, inside = split_options(text)
    maker = _find(table, kind, name)
    accepted = _options(maker)
    given = inside | given
    for option in given:
        if option not in accepted:
            fields = ", ".join(accepted) or "no options"
            raise ValueError(f"{name} takes {fields}; got {option!r}")
    missing = [each for each in accepted if accepted[each].required and each not in given]
    if missing:
        raise ValueError(f"{name} needs {' and '.join(missing)}")
    values = {
        option: _convert(f"{option} of {name}", value, accepted[option])
        for option, value in given.items()
    }
    return maker(**values)


def _find(table: Mapping[str, Callable[..., Any]], kind: str, name: str) -> Callable[..., Any]:
    if name not in table:
        raise ValueError(f"{kind} must be one of {', '.join(table)}, got {name!r}")
    return table[name]


def _options(maker: Callable[..., Any]) -> dict[str, Option]:
    """The options of a class, or of a preset, whose defaults are its own."""
    usual = None if isinstance(maker, type) else maker()
    cls: Any = maker if usual is None else type(usual)
    hints = get_type_hints(cls)
    found = {
        field.name: Option(hints[field.name], _in_words(hints[field.name]), field.default)
        for field in dataclasses.fields(cls)
    }
    if usual is None:
        return found
    return {name: each._replace(default=getattr(usual, name)) for name, each in found.items()}


def split_options(text: str) -> tuple[str, dict[str, object]]:
    """The name of a drafter and its options, written as
    "spectra:window=2,layers=0,2,4,schedule=(adaptive:memory=32)".

    Raises ValueError where options are not written like that.
    """
    check_text("the name of a drafter", text)
    name, _, inside = text.partition(":")
    return name, _split(name, inside)


def _split(name: str, text: str) -> dict[str, object]:
    """Options without the drafter's name."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    found: dict[str, str] = {}
    option = ""
    for part in filter(None, parts):
        start = re.match(r"([\w-]+)=", part)
        if start:
            option = start[1].replace("-", "_")
            found[option] = part[start.end() :]
        elif option:
            found[option] += "," + part  # the comma belongs to the value
        else:
            raise ValueError(f"options of {name} must be written option=value, got {part!r}")
    return {option: re.sub(r"^\((.*)\)$", r"\1", value) for option, value in found.items()}


def _convert(name: str, value: object, option: Option) -> Any:
    """Text as the type that the option takes; anything else as it is, which the class checks."""
    if not isinstance(value, str):
        return value
    hint, *others = _alternatives(option.annotation)
    if type(None) in others and value.lower() == "none":
        return None
    if hint is Schedule:
        return _make(SCHEDULES, "schedule", value, {})
    if hint in (Drafter, LevelDrafter):
        return make(value)
    if hint is Datastore:
        return Datastore.load(value)
    if hint is SuffixMemory:
        return SuffixMemory.load(value)
    try:
        return _parse(hint, value)
    except ValueError:
        raise ValueError(f"{name} must be {option.accepts}, got {shown(value)}") from None


def _parse(hint: Any, text: str) -> Any:
    """Text as a value of a type. Raises ValueError where it is not one."""
    if hint in (int, float):
        return hint(text)
    if get_origin(hint) is tuple:
        return tuple(int(part) for part in text.split(","))
    if hint is bool:
        return bool(("false", "true").index(text.lower()))
    if get_origin(hint) is Literal and text in get_args(hint):
        return text
    raise ValueError


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Schedule: "a schedule (" + ", ".join(SCHEDULES) + ")",
    Drafter: "a drafter",
    LevelDrafter: "a drafter that runs a model",
    Datastore: "a datastore or its directory",
    SuffixMemory: "a suffix memory or its directory",
    Params: "what specjax.load returns",
    TextTokenizer: "what specjax.load_tokenizer returns",
    Costs: "times of passes",
    type(None): "none",
}


def _in_words(annotation: Any) -> str:
    """Says what a field of this type accepts."""
    return " or ".join(map(_one_in_words, _alternatives(annotation)))


def _one_in_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "integers with commas between them"
    return _WORDS[hint]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; of any other annotation, itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)
