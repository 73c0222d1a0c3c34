"""Options that several commands share."""

from __future__ import annotations

import argparse

import specjax


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model."""
    help_ = '"tiny", a specjax checkpoint, or a Hugging Face directory'
    parser.add_argument("--model", default="tiny", help=help_)


def add_group_size(parser: argparse.ArgumentParser) -> None:
    """--group-size."""
    help_ = '32, 64, 128 or "none"'
    parser.add_argument("--group-size", type=_group_size, default=128, help=help_)


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """--quantize and --group-size."""
    help_ = "quantize a 16-bit model: rtn, mxfp4, int8 …"
    parser.add_argument("--quantize", metavar="METHOD", help=help_)
    add_group_size(parser)


def load_target(options: argparse.Namespace) -> tuple[specjax.Params, specjax.Params]:
    """The model of --model, quantized by --quantize, and as it was before."""
    original = specjax.load(options.model)
    if not options.quantize:
        return original, original
    params = specjax.quantize(original, options.quantize, group_size=options.group_size)
    return params, original


def add_cache_bits(parser: argparse.ArgumentParser) -> None:
    """--cache-bits."""
    help_ = "bits per KV cache entry"
    parser.add_argument("--cache-bits", type=int, choices=(16, 8, 4), default=16, help=help_)


def _group_size(text: str) -> int | None:
    sizes = {"none": None, "32": 32, "64": 64, "128": 128}
    if text not in sizes:
        raise argparse.ArgumentTypeError(f"must be 32, 64, 128 or none, got {text!r}")
    return sizes[text]
