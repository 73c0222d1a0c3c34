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
from specjax.files.atomic_directory import is_free
from specjax.files.locks import alone


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
    return dataclasses.replace(drafter, memory=_read(params, place))


def keep(params: specjax.Params, texts: Iterable[Sequence[int]], place: Path | None) -> None:
    """Adds token ids to the memory in a directory; None: does not.

    The memory is read again, so that texts which other processes added meanwhile stay.
    """
    if place is not None:
        folder = place.resolve().parent
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            _read(params, place).add(texts).save(place)


def _read(params: specjax.Params, place: Path) -> specjax.SuffixMemory:
    """The memory in a directory, an empty one where there is none."""
    if is_free(place):
        return specjax.SuffixMemory.create(params.config.vocab_size)
    return specjax.SuffixMemory.load(place)
