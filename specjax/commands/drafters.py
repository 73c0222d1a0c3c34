"""--drafter and its options, for every command that drafts.

`specjax.drafting.make` makes every drafter. The command line adds models: it loads those that
--draft names, casts the target by a method, and translates between two tokenizers. Options of a
drafter or model follow its name, "spectra:window=2" or "mxfp4:draft_length=5".
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import specjax
from pallas_kernels.activations import ACTIVATIONS
from specjax import drafting
from specjax.checks import shown
from specjax.commands.options import Target
from specjax.drafting.registry import NAMES, split_options

_FLAGS = {  # the field of the drafter that a flag sets -> where the parser keeps it
    "draft_length": "draft_length",
    "activation": "draft_activation",
    "layers": "layers",
    "confidence": "confidence",
    "share_cache": "share_cache",
    "datastore": "datastore",
}
_NEEDED = {  # the field that a drafter cannot do without, and how to give it
    "layer-skip": ("layers", "--layers, such as 0,2,4: specjax plan layers finds some"),
    "retrieval": ("datastore", "--datastore: specjax datastore build makes one"),
}
_SKIPPED = {  # sets of layers that need no search, by what stands for their numbers
    f"skip-{skipped.replace(' ', '-')}": skipped
    for skipped in ("first half", "last half", "alternate")
}
_CORES = ("spectra", "spectra-paper")
_WITH_CORPUS = ("retrieval", *_CORES)
_NAMED = tuple(
    name for name in NAMES if name not in ("translated-draft", "combined", "multi-level")
)
_RUN_A_MODEL = tuple(name for name in _NAMED if "activation" in drafting.options(name))
_OF_A_MODEL = tuple(
    name for name in drafting.options("draft-model") if not name.startswith("params")
)
_LOOK_UP = tuple(name for name in _NAMED if name not in ("autoregressive", *_RUN_A_MODEL))


class DrafterOptions(NamedTuple):
    """The choice of a drafter.

    drafter: its name; None: auto, or qspec where its fields or models below it are given.
    fields: its fields by name, as objects or as text. Where several models draft, `draft_length`
        may hold one number for each; `activation` and `confidence` are those of all.
    draft: models, quantization methods that cast the target, and drafters without a model: the
        first is what draft-model drafts with, each other one drafts for the one before it. Own
        options may follow a name; they come before those in `fields`.
    draft_lm_head: whether casts quantize the output head too.
    """

    drafter: str | None = None
    fields: Mapping[str, object] = {}
    draft: Sequence[str] = ()
    draft_lm_head: bool = False


class _Level(NamedTuple):
    """A drafter to be made. text: its name, which options may follow after a colon."""

    text: str
    fields: dict[str, object]

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]


def add_drafter(parser: argparse.ArgumentParser) -> None:
    """--drafter, and the options of all drafters."""
    add = parser.add_argument_group("drafting").add_argument
    names = ", ".join(_NAMED)
    add(
        "--drafter",
        metavar="NAME[:OPTION=VALUE,…]",
        help=f"{names}; if left out, auto, or qspec where options of drafting are given. Options "
        "are the drafter's fields, such as spectra:window=2,guesses=2 or qspec:schedule=heuristic",
    )
    add(
        "--draft-length",
        type=integers,
        metavar="N",
        help="tokens per draft; N,M where a second model drafts for the first",
    )
    add(
        "--draft-activation",
        choices=ACTIVATIONS,
        help="activation precision of the draft; qspec: a8, other models: a16 if left out; a4 is "
        "for papers' tables, and never cheaper than a8 here",
    )
    add(
        "--draft",
        action="append",
        default=[],
        metavar="MODEL_OR_METHOD[:OPTION=VALUE,…]",
        help="the model of draft-model, or a quantization method that casts the target to one; "
        "given again, or with qspec or layer-skip: the next drafter, which may also be "
        + ", ".join(_LOOK_UP),
    )
    add("--draft-lm-head", action="store_true", help="quantize the output head of casts too")
    add("--share-cache", action="store_true", help="let a cast draft from the target's KV cache")
    add(
        "--layers",
        type=_layers,
        metavar="0,2,…",
        help="the layers that layer-skip drafts with, or " + ", ".join(_SKIPPED),
    )
    add(
        "--confidence",
        type=float,
        metavar="P",
        help="end a draft at a token of smaller probability; never if left out",
    )
    add(
        "--datastore",
        metavar="DIR",
        help="corpus of retrieval, and with spectra a second source: specjax datastore build "
        "makes one",
    )


def read_drafter(options: argparse.Namespace) -> DrafterOptions:
    """The choice that the options make. Raises ValueError where a field is given twice."""
    name, fields = split_options(options.drafter) if options.drafter else (None, {})
    for field, flag in _FLAGS.items():
        value = getattr(options, flag)
        if value is None or value is False:
            continue
        if field in fields:
            other = "--" + flag.replace("_", "-")
            raise ValueError(f"--drafter {options.drafter} and {other} both give {field}")
        fields[field] = value
    return DrafterOptions(name, fields, options.draft, options.draft_lm_head)


def make_drafter(chosen: DrafterOptions, target: Target) -> specjax.Drafter:
    """Makes the drafter.

    Raises:
      FileNotFoundError: a model or a datastore is missing.
      ValueError: the drafter or an option is unknown, an option is missing, or a value is not
        accepted.
    """
    levels = _levels(chosen, target)
    _distribute(chosen.fields, levels)
    first, *others = [_made(level, target) for level in levels]
    if isinstance(first, specjax.QSpec):
        _check_four_bits(first, target)
    return specjax.MultiLevel.of([first, *others])


def read_written(text: str, draft_lm_head: bool = False) -> DrafterOptions:
    """The choice that one text makes: NAME:OPTION=VALUE,…+BELOW+….

    Args:
      text: the drafter's name and fields, and what --draft would name, each after a "+".
      draft_lm_head: whether casts quantize the output head too.

    Raises ValueError where the text is not written like that.
    """
    first, *below = text.split("+")
    name, fields = split_options(first)
    if name == "draft-model" and not below:
        raise ValueError(
            f"draft-model needs a model or a quantization method after it, such as "
            f"draft-model+mxfp4, got {shown(text)}"
        )
    return DrafterOptions(name, fields, below, draft_lm_head and bool(below))


def with_lengths(text: str, lengths: Sequence[int]) -> list[str]:
    """A drafter written as for `read_written`, with each draft length; as it is where it has one,
    or can have none. Raises ValueError for a drafter that is unknown."""
    first, sign, below = text.partition("+")
    name, fields = split_options(first)
    if not lengths or "draft_length" in fields or "draft_length" not in drafting.options(name):
        return [text]
    mark = "," if fields else ":"
    return [f"{first}{mark}draft_length={length}{sign}{below}" for length in lengths]


def integers(text: str) -> tuple[int, ...]:
    """Integers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"must be integers with commas between them, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _layers(text: str) -> tuple[int, ...] | str:
    """Numbers of layers, or the name of a set of them."""
    return text if text in _SKIPPED else integers(text)


def _levels(chosen: DrafterOptions, target: Target) -> list[_Level]:
    """The drafters from the target's own down, each with its model."""
    name = chosen.drafter or ("qspec" if chosen.fields or chosen.draft else "auto")
    if name not in NAMES:
        raise ValueError(f"drafter must be one of {', '.join(_NAMED)}, got {name!r}")
    first, drafts = _Level(name, {}), list(chosen.draft)
    if drafts and first.name not in _RUN_A_MODEL:
        owners = ", ".join(_RUN_A_MODEL)
        raise ValueError(f"--draft goes with --drafter {owners}, got {first.name}")
    if chosen.draft_lm_head and not drafts:
        raise ValueError("--draft-lm-head goes with --draft and a quantization method")
    if first.name == "draft-model":
        if not drafts or _Level(drafts[0], {}).name in _LOOK_UP:
            raise ValueError(
                "--drafter draft-model needs --draft: a model, or a quantization method such as "
                "mxfp4"
            )
        first = _below(drafts.pop(0), chosen.draft_lm_head, target)
    return [first, *(_below(draft, chosen.draft_lm_head, target) for draft in drafts)]


def _below(text: str, lm_head: bool, target: Target) -> _Level:
    """A drafter that --draft names: one without a model, a cast of the target, or a directory's."""
    if (level := _Level(text, {})).name in _LOOK_UP:
        return level
    name, own = _with_options(text)
    level = _with_model(name, lm_head, target)
    return level._replace(fields={**own, **level.fields})


def _with_options(text: str) -> tuple[str, dict[str, object]]:
    """A model or method, and its options. The name of a file may hold a colon too."""
    found = None if os.path.exists(text) else re.match(r"(.*?):([\w-]+=.*)", text)
    if found is None:
        return text, {}
    own = split_options(f"draft-model:{found[2]}")[1]
    for option in own:
        if option not in _OF_A_MODEL:
            accepted = ", ".join(_OF_A_MODEL)
            raise ValueError(f"--draft {text}: a model takes {accepted}; got {option!r}")
    return found[1], own


def _with_model(name: str, lm_head: bool, target: Target) -> _Level:
    """A drafter that runs the target cast by a method, or a directory's model."""
    params = _cast(name, lm_head, target)
    if params is not None:
        return _Level("draft-model", {"params": params})
    params = specjax.load(name)
    tokenizer = specjax.load_tokenizer(target.source)
    try:
        own = specjax.load_tokenizer(name)
    except FileNotFoundError:  # a draft without one must speak the target's tokens
        return _Level("draft-model", {"params": params})
    if own.same_tokens(tokenizer):
        return _Level("draft-model", {"params": params})
    fields = {"params": params, "draft_tokenizer": own, "target_tokenizer": tokenizer}
    return _Level("translated-draft", fields)


def _cast(name: str, lm_head: bool, target: Target) -> specjax.Params | None:
    """The target cast by the method of that name; None where it names a model.

    Raises ValueError where it names neither.
    """
    from checkpoints_tools.quantization.recipe import Recipe
    from checkpoints_tools.sources import locate  # here: not every command needs them

    try:
        Recipe(name)
    except ValueError as error:
        try:
            locate(name)
        except FileNotFoundError:
            raise ValueError(f"--draft names no model, and no method: {error}") from None
        return None
    original = specjax.dequantize(target.original)
    return specjax.quantize(original, name, group_size=target.group_size, lm_head=lm_head)


def _distribute(fields: Mapping[str, object], levels: Sequence[_Level]) -> None:
    """Gives each level the fields that are for it; the first has those that are not shared."""
    with_model = (*_RUN_A_MODEL, "translated-draft")
    models = [level for level in levels if level.name in with_model] or levels[:1]
    owners = {
        "draft_length": models,
        "activation": models,
        "confidence": models,
        "datastore": [level for level in levels if level.name in _WITH_CORPUS] or levels[:1],
    }
    if len(models) > 1:
        usual = drafting.options(models[0].name)["draft_length"].default
        fields = {"draft_length": usual, **fields}
    for name, value in fields.items():
        chosen = owners.get(name, levels[:1])
        values = _lengths(value, len(chosen)) if name == "draft_length" else [value] * len(chosen)
        for level, shared in zip(chosen, values, strict=True):
            level.fields.setdefault(name, shared)


def _lengths(value: object, levels: int) -> Sequence[object]:
    """One draft length per level."""
    given = value.split(",") if isinstance(value, str) else value
    lengths = given if isinstance(given, tuple | list) else (given,)
    if len(lengths) == 1:
        return [lengths[0]] * levels
    if len(lengths) != levels:
        raise ValueError(
            f"--draft-length must be one number or one per level, {levels}; got {len(lengths)}"
        )
    return lengths


def _made(level: _Level, target: Target) -> specjax.Drafter:
    """The drafter; spectra with a datastore is both of SPECTRA's halves."""
    fields = dict(level.fields)
    if (skipped := _SKIPPED.get(str(fields.get("layers")))) is not None:
        fields["layers"] = specjax.LayerSkip.skipping(target.params, skipped).layers
    corpus = fields.pop("datastore", None) if level.name in _CORES else None
    needed, how = _NEEDED.get(level.text, (None, ""))
    if needed is not None and needed not in fields:
        raise ValueError(f"{level.text} needs {how}")
    drafter = drafting.make(level.text, **fields)
    if corpus is None:
        return drafter
    retrieval = drafting.make("retrieval", datastore=corpus)
    return drafting.make("combined", first=drafter, second=retrieval)


def _check_four_bits(drafter: specjax.QSpec, target: Target) -> None:
    """Raises ValueError, with advice, for a target without 4-bit weights."""
    try:
        drafter.validate(target.params, positions=0)
    except ValueError:
        raise ValueError(
            f"{target.source} holds 16-bit weights, and the qspec drafter needs 4-bit ones: "
            "add --quantize rtn, or decode it with --drafter draft-model --draft mxfp4 or "
            "--drafter autoregressive"
        ) from None
