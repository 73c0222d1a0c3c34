"""--drafter and its options, for every command that drafts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import specjax


class Kind(NamedTuple):
    """How a drafter is made from the options, the target and the target before --quantize; and
    which of the options below are its own."""

    make: Callable[[argparse.Namespace, specjax.Params, specjax.Params], specjax.Drafter]
    options: tuple[str, ...]


def add_drafter(parser: argparse.ArgumentParser) -> None:
    """--drafter, and the options of every kind."""
    add = parser.add_argument
    add("--drafter", choices=tuple(DRAFTERS), default="qspec")
    add("--draft-length", type=integers, metavar="N", help="tokens per draft; N,M for two levels")
    add("--activation", choices=("a16", "a8", "a4"), help="the draft's activations")
    add(
        "--draft",
        action="append",
        metavar="MODEL_OR_METHOD",
        help="what draft-model drafts with: a model, or a quantization method that casts the "
        "target; given again, what drafts for that",
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
    drafter = specjax.QSpec(_lengths(options, 1, 3)[0], options.activation or "a8")
    try:
        drafter.validate(params, positions=0)
    except ValueError:
        raise ValueError(
            f"{options.model} holds 16-bit weights, and the qspec drafter needs 4-bit ones: "
            "add --quantize rtn, or decode it with --drafter draft-model --draft mxfp4 or "
            "--drafter autoregressive"
        ) from None
    return drafter


def _draft_model(
    options: argparse.Namespace, params: specjax.Params, original: specjax.Params
) -> specjax.Drafter:
    if not options.draft:
        raise ValueError(
            "--drafter draft-model needs --draft: a model, or a quantization method such as mxfp4"
        )
    *outer, last = [
        specjax.DraftModel(
            _load_or_cast(options, draft, original),
            length,
            options.activation or "a16",
            share_cache=options.share_cache and level == 0,
        )
        for level, (draft, length) in enumerate(
            zip(options.draft, _lengths(options, len(options.draft), 5), strict=True)
        )
    ]
    return specjax.MultiLevel.of([*outer, dataclasses.replace(last, confidence=options.confidence)])


def _layer_skip(
    options: argparse.Namespace, params: specjax.Params, original: specjax.Params
) -> specjax.Drafter:
    layers = options.layers
    if layers is None:
        raise ValueError(
            "--drafter layer-skip needs --layers, such as 0,2,4: specjax plan layers finds some"
        )
    (length,) = _lengths(options, 1, 3)
    drafter = specjax.LayerSkip(
        layers, length, options.activation or "a16", confidence=options.confidence
    )
    drafter.validate(params, positions=0)
    return drafter


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


def _load_or_cast(
    options: argparse.Namespace, draft: str, original: specjax.Params
) -> specjax.Params:
    """The model of that name, or the target cast by that method."""
    from checkpoints_tools.quantize.recipe import Recipe  # here: not every command needs it

    try:
        Recipe(draft)
    except ValueError as error:
        try:
            return specjax.load(draft)
        except FileNotFoundError:
            raise ValueError(f"--draft names no model, and no method: {error}") from None
    return specjax.quantize(
        original, draft, group_size=options.group_size, lm_head=options.draft_lm_head
    )


DRAFTERS = {
    "qspec": Kind(_qspec, ("draft_length", "activation")),
    "autoregressive": Kind(_autoregressive, ()),
    "draft-model": Kind(
        _draft_model,
        ("draft", "draft_lm_head", "share_cache", "draft_length", "activation", "confidence"),
    ),
    "layer-skip": Kind(_layer_skip, ("layers", "draft_length", "activation", "confidence")),
}
_ALL_OPTIONS = tuple(dict.fromkeys(name for kind in DRAFTERS.values() for name in kind.options))
