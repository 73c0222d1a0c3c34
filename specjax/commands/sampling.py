"""How a command draws tokens: options that several commands share."""

from __future__ import annotations

import argparse
import dataclasses

import specjax
from specjax.commands.options import read_bias, seed
from specjax.speculation.sampling import CHANGES


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """--temperature and what else draws tokens, and --seed."""
    add = parser.add_argument_group("sampling (greedy if all are left out)").add_argument
    for name, type_, metavar, help_ in (
        ("--temperature", float, "T", "divide the logits by T; 0 is greedy; 1 if left out"),
        ("--top-k", int, "K", "sample from the K most probable tokens"),
        ("--top-p", float, "P", "sample from the most probable tokens that reach P together"),
        ("--min-p", float, "P", "sample from tokens at least P times as probable as the first"),
        ("--repetition-penalty", float, "X", "make tokens that occurred less probable; 1: off"),
        ("--presence-penalty", float, "X", "make tokens of the output less probable; 0: off"),
        ("--frequency-penalty", float, "X", "the same as often as the output has them; 0: off"),
    ):
        add(name, type=type_, metavar=metavar, help=help_)
    add(
        "--logit-bias",
        type=read_bias,
        action="append",
        metavar="ID=X",
        help="add X, from -100 to 100, to the logit of a token id; repeatable",
    )
    add("--seed", type=seed, default=0, metavar="N", help="seed of the random key; 0 if left out")


def chosen_sampling(options: argparse.Namespace) -> specjax.Sampling | None:
    """How to sample; None where no option of sampling is given, or a temperature of 0 alone."""
    names = [field.name for field in dataclasses.fields(specjax.Sampling)]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if given.get("temperature") == 0:
        changes = {name: value for name, value in given.items() if name in CHANGES}
        return specjax.Sampling(top_k=1, **changes) if changes else None
    return specjax.Sampling(**given) if given else None
