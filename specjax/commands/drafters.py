"""--drafter and its options, for every command that drafts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import specjax
from pallas_kernels.activations import Activation


class Kind(NamedTuple):
    """How a drafter is made from the options, the target and the target before --quantize; and
    which of the options below are its own."""

    make: Callable[[argparse.Namespace, specjax.Params, specjax.Params], specjax.Drafter]
    options: tuple[str, ...]


def add_drafter(parser: argparse.ArgumentParser) -> None:
    """--drafter, and the options of every kind."""
    add = parser.add_argument
    add("--drafter", choices=tuple(DRAFTERS), default="qspec")
    add(
        "--draft-length",
        type=integers,
        metavar="N",
        help="tokens per draft; N,M for two levels that run a model",
    )
    add("--activation", choices=("a16", "a8", "a4"), help="the draft's activations")
    add(
        "--draft",
        action="append",
        metavar="MODEL_OR_METHOD",
        help="what draft-model drafts with: a model, or a quantization method that casts the "
        "target. Given again, or with qspec or layer-skip: what drafts for that, one of these or "
        + ", ".join(MODEL_FREE),
    )
    add(
        "--datastore",
        metavar="DIR",
        help="of retrieval, and of spectra's second half: what specjax datastore build made",
    )
    add("--draft-lm-head", action="store_true", help="cast the output head too")
    add("--share-cache", action="store_true", help="a cast drafts from the target's KV cache")
    add("--layers", type=integers, metavar="0,2,…", help="what layer-skip drafts with")
    add("--confidence", type=float, help="a draft ends with a token less probable than this")


def make_drafter(
    options: argparse.Namespace, params: specjax.Params, original: specjax.Params
) -> specjax.Drafter:
    """The drafter that the options name.

    original: the target before --quantize, which casts are made of.

    Raises ValueError for an option of another drafter, and what the drafter's own checks raise.
    """
    kind = DRAFTERS[options.drafter]
    for name in _ALL_OPTIONS:
        if getattr(options, name) not in (None, False) and name not in kind.options:
            owners = ", ".join(owner for owner, each in DRAFTERS.items() if name in each.options)
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} goes with --drafter {owners}, got {options.drafter}")
    return kind.make(options, params, original)


def integers(text: str) -> tuple[int, ...]:
    """Integers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"must be integers with commas between them, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _autoregressive(*_: object) -> specjax.Drafter:
    return specjax.Autoregressive()


def _qspec(
    options: argparse.Namespace, params: specjax.Params, original: specjax.Params
) -> specjax.Drafter:
    length, *below = _lengths(options, 1 + _models_below(options), 3)
    drafter = specjax.QSpec(length, options.activation or "a8")
    try:
        drafter.validate(params, positions=0)
    except ValueError:
        raise ValueError(
            f"{options.model} holds 16-bit weights, and the qspec drafter needs 4-bit ones: "
            "add --quantize rtn, or decode it with --drafter draft-model --draft mxfp4 or "
            "--drafter autoregressive"
        ) from None
    return _nested([drafter, *_drafts(options, original, below)], None)


def _draft_model(
    options: argparse.Namespace, params: specjax.Params, original: specjax.Params
) -> specjax.Drafter:
    if not options.draft or options.draft[0] in MODEL_FREE:
        raise ValueError(
            "--drafter draft-model needs --draft: a model, or a quantization method such as mxfp4"
        )
    first, *others = _drafts(options, original, _lengths(options, _models_below(options), 5))
    if options.share_cache:
        if not isinstance(first, specjax.DraftModel):
            raise ValueError("--share-cache goes with a draft made of the target's own weights")
        first = dataclasses.replace(first, share_cache=True)
    return _nested([first, *others], options.confidence)


def _layer_skip(
    options: argparse.Namespace, params: specjax.Params, original: specjax.Params
) -> specjax.Drafter:
    layers = options.layers
    if layers is None:
        raise ValueError(
            "--drafter layer-skip needs --layers, such as 0,2,4: specjax plan layers finds some"
        )
    length, *below = _lengths(options, 1 + _models_below(options), 3)
    drafter = specjax.LayerSkip(layers, length, options.activation or "a16")
    drafter.validate(params, positions=0)
    return _nested([drafter, *_drafts(options, original, below)], options.confidence)


def _prompt_lookup(options: argparse.Namespace, *_: object) -> specjax.Drafter:
    (length,) = _lengths(options, 1, specjax.PromptLookup().draft_length)
    return specjax.PromptLookup(length)


def _ngram(options: argparse.Namespace, *_: object) -> specjax.Drafter:
    (length,) = _lengths(options, 1, specjax.NGram().draft_length)
    return specjax.NGram(length)


def _lookahead(*_: object) -> specjax.Drafter:
    return specjax.Lookahead()


def _spectra(options: argparse.Namespace, *_: object) -> specjax.Drafter:
    core = specjax.Spectra()
    return core if options.datastore is None else specjax.Combined(core, _retrieval(options))


def _retrieval(options: argparse.Namespace, *_: object) -> specjax.Drafter:
    if options.datastore is None:
        raise ValueError("retrieval needs --datastore: specjax datastore build makes one")
    return specjax.Retrieval(specjax.Datastore.load(options.datastore))


def _models_below(options: argparse.Namespace) -> int:
    """How many of --draft run a model."""
    return sum(name not in MODEL_FREE for name in options.draft or ())


def _lengths(options: argparse.Namespace, levels: int, default: int) -> tuple[int, ...]:
    """One draft length per level."""
    lengths = options.draft_length or (default,)
    if len(lengths) == 1:
        return lengths * levels
    if len(lengths) != levels:
        raise ValueError(
            f"--draft-length must be one number or one per level, {levels}; got {len(lengths)}"
        )
    return lengths


def _drafts(
    options: argparse.Namespace, original: specjax.Params, lengths: Sequence[int]
) -> list[specjax.Drafter]:
    """What --draft names, each model with its draft length."""
    remaining = iter(lengths)
    return [
        MODEL_FREE[name](argparse.Namespace(**vars(options) | {"draft_length": None}))
        if name in MODEL_FREE
        else _draft(options, name, original, next(remaining))
        for name in options.draft or ()
    ]


def _draft(
    options: argparse.Namespace, name: str, original: specjax.Params, length: int
) -> specjax.Drafter:
    """A drafting model: that of a directory, or the target cast by a method."""
    activation: Activation = options.activation or "a16"
    params = _cast(options, name, original)
    if params is not None:
        return specjax.DraftModel(params, length, activation)
    params = specjax.load(name)
    target = specjax.load_tokenizer(options.model)
    try:
        own = specjax.load_tokenizer(name)
    except FileNotFoundError:  # a draft without one must speak the target's tokens
        return specjax.DraftModel(params, length, activation)
    if own.same_tokens(target):
        return specjax.DraftModel(params, length, activation)
    return specjax.TranslatedDraft(params, own, target, length, activation)


def _cast(
    options: argparse.Namespace, name: str, original: specjax.Params
) -> specjax.Params | None:
    """The target cast by the method of that name; None where it names a model.

    Raises ValueError where it names neither.
    """
    from checkpoints_tools.loading import locate  # here: not every command needs them
    from checkpoints_tools.quantization.recipe import Recipe

    try:
        Recipe(name)
    except ValueError as error:
        try:
            locate(name)
        except FileNotFoundError:
            raise ValueError(f"--draft names no model, and no method: {error}") from None
        return None
    return specjax.quantize(
        original, name, group_size=options.group_size, lm_head=options.draft_lm_head
    )


def _nested(levels: Sequence[specjax.Drafter], confidence: float | None) -> specjax.Drafter:
    """Each level drafted for by the next; `confidence` is the last one's."""
    *outer, last = levels
    if confidence is not None:
        if not isinstance(last, specjax.DraftModel | specjax.TranslatedDraft | specjax.LayerSkip):
            raise ValueError(
                f"--confidence goes with a model as last drafter, got {type(last).__name__}"
            )
        last = dataclasses.replace(last, confidence=confidence)
    return specjax.MultiLevel.of([*outer, last])


MODEL_FREE: dict[str, Callable[..., specjax.Drafter]] = {
    "prompt-lookup": _prompt_lookup,
    "ngram": _ngram,
    "lookahead": _lookahead,
    "spectra": _spectra,
    "retrieval": _retrieval,
}
DRAFTERS = {
    "qspec": Kind(_qspec, ("draft", "draft_lm_head", "datastore", "draft_length", "activation")),
    "autoregressive": Kind(_autoregressive, ()),
    "draft-model": Kind(
        _draft_model,
        (
            "draft", "draft_lm_head", "datastore", "share_cache", "draft_length", "activation",
            "confidence",
        ),
    ),
    "layer-skip": Kind(
        _layer_skip,
        (
            "layers", "draft", "draft_lm_head", "datastore", "draft_length", "activation",
            "confidence",
        ),
    ),
    "prompt-lookup": Kind(_prompt_lookup, ("draft_length",)),
    "ngram": Kind(_ngram, ("draft_length",)),
    "lookahead": Kind(_lookahead, ()),
    "spectra": Kind(_spectra, ("datastore",)),
    "retrieval": Kind(_retrieval, ("datastore",)),
}  # fmt: skip
_ALL_OPTIONS = tuple(dict.fromkeys(name for kind in DRAFTERS.values() for name in kind.options))
