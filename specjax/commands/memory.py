"""--memory: a directory of texts that a command drafts from and adds its own to."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import specjax
from specjax.checks import shown
from specjax.commands.options import add_output
from specjax.drafting.suffix_memory import check_target


def add_memory(parser: argparse.ArgumentParser) -> None:
    """--memory."""
    help_ = "draft from the texts in this memory too, and add the new one; made if it is missing"
    add_output(parser, "--memory", directory=True, check=check_target, metavar="DIR", help=help_)


def with_memory(
    drafter: specjax.Drafter, params: specjax.Params, place: Path | None
) -> specjax.Drafter:
    """The drafter with the memory in a directory; None: as it is.

    Raises ValueError where the drafter takes no memory, or the directory holds something else.
    """
    if place is None:
        return drafter
    if not isinstance(drafter, specjax.Auto):
        raise ValueError(f"--memory goes with --drafter auto, got {shown(drafter)}")
    if place.exists():
        memory = specjax.SuffixMemory.load(place)
    else:
        memory = specjax.SuffixMemory.create(params.config.vocab_size)
    return dataclasses.replace(drafter, memory=memory)


def keep(drafter: specjax.Drafter, texts: Iterable[Sequence[int]], place: Path | None) -> None:
    """Adds token ids to the drafter's memory, and writes it to its directory; None: does not."""
    if place is not None:
        assert isinstance(drafter, specjax.Auto) and drafter.memory is not None
        drafter.memory.add(texts).save(place)
