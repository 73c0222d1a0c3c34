"""`specjax convert`, its synonym `quantize`, and `export`: from one directory to another."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import specjax
from specjax.commands.options import add_group_size, add_output, integer
from specjax.files.atomic_directory import check_new
from specjax.files.json_lines import read_text


def add(commands: Any) -> None:
    """Adds the commands to a parser's."""
    _add_convert(
        commands.add_parser("convert", help="a model -> specjax checkpoint, quantized on request")
    )
    synonym = "the same as convert; without --quantize, the method is rtn"
    _add_convert(commands.add_parser("quantize", help=synonym, description=synonym), quantize="rtn")
    _add_export(commands.add_parser("export", help="specjax checkpoint -> Hugging Face directory"))


def _add_convert(parser: argparse.ArgumentParser, quantize: str | None = None) -> None:
    """The options of convert; `quantize` is the default method."""
    add = parser.add_argument
    add("source", help="Hugging Face directory, specjax checkpoint, or the name of a model")
    add_output(parser, "out", directory=True, help="where the checkpoint goes")
    add(
        "--quantize",
        metavar="METHOD",
        default=quantize,
        help="rtn, rtn-clip, int8, nested8, mxfp4, mxfp4-even; with calibration text: gptq, "
        "gptq-clip, awq, atom; quarot+, awq+, atom+ and act-order+ go before others; exact: "
        "bfloat12, nested16",
    )
    add_group_size(parser)
    add("--bits", type=integer, choices=(4, 3, 2), default=4, help="3 and 2 save nothing")
    add("--lm-head", action="store_true", help="quantize the output head too")
    add("--dtype", choices=("bfloat16", "float32"), help="of weights that stay unquantized")
    add("--calibration", type=Path, metavar="FILE", help="a file of calibration text")
    help_ = "sequences taken from the calibration text; 16 if left out"
    add("--sequences", type=integer, metavar="N", help=help_)
    add("--length", type=integer, metavar="N", help="tokens in each; 512 if left out")
    parser.set_defaults(run=_convert)


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help='specjax checkpoint, or "tiny"')
    help_ = "where the Hugging Face directory goes"
    add_output(parser, "out", directory=True, check=check_new, help=help_)
    parser.set_defaults(run=_export)


def _convert(options: argparse.Namespace) -> None:
    specjax.convert(
        options.source,
        options.out,
        quantization=options.quantize,
        group_size=options.group_size,
        bits=options.bits,
        lm_head=options.lm_head,
        dtype=options.dtype,
        calibration=_calibration(options),
    )


def _export(options: argparse.Namespace) -> None:
    from checkpoints_tools.sources import locate  # here: other commands start without its libraries

    tokenizer_dir = locate(options.source)
    specjax.export(specjax.load(options.source), options.out, tokenizer_dir=tokenizer_dir)


def _calibration(options: argparse.Namespace) -> np.ndarray | None:
    """The calibration text as tokens."""
    sizes = {name: getattr(options, name) for name in ("sequences", "length")}
    given = {name: size for name, size in sizes.items() if size is not None}
    if options.calibration is None:
        if given:
            raise ValueError("--sequences and --length go with --calibration FILE")
        return None
    text = read_text(options.calibration)
    tokenizer = specjax.load_tokenizer(options.source)
    return specjax.calibration_tokens(text, tokenizer, **given)
