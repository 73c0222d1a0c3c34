"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import specjax
from specjax.checks import check_seed, shown
from specjax.files.atomic_directory import TargetCheck
from specjax.files.outputs import check_output

if TYPE_CHECKING:
    from jax.sharding import Mesh

MOST = 2**31 - 1  # of any count
_OUTPUTS = "outputs"  # where a parser keeps what its command writes
_GROUP_SIZES = {"none": None, "32": 32, "64": 64, "128": 128}


class HelpFormatter(argparse.HelpFormatter):
    """Help with one line per command, and room for long options beside their help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _iter_indented_subactions(
        self, action: argparse.Action
    ) -> Generator[argparse.Action, None, None]:
        for each in super()._iter_indented_subactions(action):
            self._dedent()  # argparse aligns commands as if they were not indented
            yield each
            self._indent()

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        listed = isinstance(action, argparse._SubParsersAction)
        return text.partition("\n")[2] if listed else text  # without the line of the metavar


class Parser(argparse.ArgumentParser):
    """A parser whose commands, and theirs, show their help in the same way."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})  # type: ignore[arg-type]


class Target(NamedTuple):
    """The model that a command decodes with.

    source: the name or directory that it was loaded from.
    params: the model, quantized on request.
    original: the model as it was loaded; casts are made of it.
    group_size: weights per scale, of the quantized model and of casts.
    """

    source: str
    params: specjax.Params
    original: specjax.Params
    group_size: int | None = 128


def load_target(
    source: str, quantize: str | None, group_size: int | None, mesh: Mesh | None = None
) -> Target:
    """Loads a model, onto a mesh if one is given, and quantizes it by a method; None: leaves it as
    it is."""
    original = specjax.load(source, mesh=mesh)
    if not quantize:
        return Target(source, original, original, group_size)
    if original.quantized:
        from checkpoints_tools.quantization.dequantization import warn_of_rounding_again

        warn_of_rounding_again(source)
    params = specjax.quantize(specjax.dequantize(original), quantize, group_size=group_size)
    return Target(source, params, original, group_size)


def chosen_target(options: argparse.Namespace) -> Target:
    """The model that --model, --quantize and --group-size name."""
    return load_target(options.model, options.quantize, options.group_size)


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model."""
    help_ = 'a directory, a GGUF file, a name on the Hub, or "smollm2"; "tiny" if left out'
    parser.add_argument("--model", default="tiny", help=help_)


def add_group_size(parser: argparse.ArgumentParser) -> None:
    """--group-size."""
    help_ = "weights per scale: 32, 64, 128 (default) or none, one scale per channel"
    parser.add_argument("--group-size", type=read_group_size, default=128, metavar="N", help=help_)


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """--quantize and --group-size."""
    help_ = "quantize the model first: rtn, mxfp4, int8 …"
    parser.add_argument("--quantize", metavar="METHOD", help=help_)
    add_group_size(parser)


def add_cache_bits(parser: argparse.ArgumentParser) -> None:
    """--cache-bits."""
    help_ = "bits per KV cache entry: 16 (default), 8 or 4"
    parser.add_argument("--cache-bits", type=int, choices=(16, 8, 4), default=16, help=help_)


def add_sample_seed(parser: argparse.ArgumentParser) -> None:
    """--sample-seed."""
    help_ = "take --limit items at random, as this seed decides; the first ones if left out"
    parser.add_argument("--sample-seed", type=seed, metavar="N", help=help_)


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    add_output(parser, "--json", metavar="FILE", help="write the numbers to this file")


def add_picture(parser: argparse.ArgumentParser, help_: str) -> None:
    """--picture."""
    add_output(parser, "--picture", metavar="FILE", help=help_)


def add_output(
    parser: argparse.ArgumentParser,
    name: str,
    *,
    directory: bool = False,
    check: TargetCheck | None = None,
    **described: str,
) -> None:
    """An argument that names a file or a directory that the command writes.

    `check` raises ValueError if a path holds what must not be replaced.
    """
    action = parser.add_argument(name, type=Path, **described)  # type: ignore[arg-type]
    others = parser.get_default(_OUTPUTS) or ()
    parser.set_defaults(**{_OUTPUTS: (*others, (action.dest, directory, check))})


def check_outputs(options: argparse.Namespace) -> None:
    """Checks every file and directory that the command will write.

    Raises OSError if it cannot be written, and ValueError if it must not be replaced.
    """
    for name, directory, check in getattr(options, _OUTPUTS, ()):
        path = getattr(options, name)
        if path is not None:
            check_output(path, directory=directory)
            if check is not None:
                check(path)


def integer(text: str) -> int:
    """A count from its text. Raises argparse.ArgumentTypeError for anything else."""
    try:
        found = int(text)
    except ValueError:  # also of more than 4300 digits
        found = MOST + 1
    if abs(found) > MOST:
        raise argparse.ArgumentTypeError(f"must be an integer up to {MOST}, got {shown(text)}")
    return found


def at_least(least: int) -> Callable[[str], int]:
    """A reader of counts from `least` on, which raises argparse.ArgumentTypeError for others."""

    def read(text: str) -> int:
        found = integer(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {found}")
        return found

    return read


def seed(text: str) -> int:
    """A seed from its text. Raises argparse.ArgumentTypeError for anything else."""
    try:
        return check_seed("it", int(text) if len(text) < 100 else text)
    except ValueError:
        accepted = f"an integer from 0 to {2**32 - 1}"
        raise argparse.ArgumentTypeError(f"must be {accepted}, got {shown(text)}") from None


def read_bias(text: str) -> tuple[int, float]:
    """A token id and its bias from "ID=X". Raises argparse.ArgumentTypeError for anything else."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        accepted = "a token id and a number, for example 17=-5"
        raise argparse.ArgumentTypeError(f"must be {accepted}, got {shown(text)}") from None


def unicode_text(text: str) -> str:
    """An argument that is text. Raises argparse.ArgumentTypeError if its bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        given = shown(os.fsencode(text))
        raise argparse.ArgumentTypeError(f"must be UTF-8 text, got {given}") from None
    return text


def read_group_size(text: str) -> int | None:
    """A group size from its text. Raises argparse.ArgumentTypeError for any other."""
    if text not in _GROUP_SIZES:
        raise argparse.ArgumentTypeError(f"must be 32, 64, 128 or none, got {text!r}")
    return _GROUP_SIZES[text]
