"""`specjax lm-eval`: the command line of lm-evaluation-harness, with specjax among its models.

The harness looks models up in a table of its own, which no package can enter from outside; so the
command enters this one and hands over.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any, NoReturn

import specjax
from specjax.commands.drafters import add_drafter, make_drafter
from specjax.commands.options import add_cache_bits, add_quantize, load_target

_AUTOMATIC_ROWS = 8  # for the harness's --batch_size auto


def add(commands: Any) -> None:
    """Adds the command to a parser's. What follows its name is the harness's to read."""
    help_ = "lm-evaluation-harness, with --model specjax"
    parser = commands.add_parser("lm-eval", help=help_, add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=_lm_eval)


def _lm_eval(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval needs the harness: pip install 'specjax[lm-eval]'")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    from specjax.evaluation.lm_eval import SpecjaxLM

    @register_model("specjax")
    class _FromOptions(SpecjaxLM):
        def __init__(self, **given: Any) -> None:
            super().__init__(**read_options(**given))

    sys.argv[1:] = options.arguments
    cli_evaluate()


def read_options(
    pretrained: str = "tiny",
    *,
    batch_size: int | str = _AUTOMATIC_ROWS,
    max_length: int | None = None,
    seed: int = 0,
    device: str | None = None,
    max_batch_size: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `SpecjaxLM` is made of, from the harness's --model_args.

    Args:
      pretrained: the model, as `specjax.load` takes it.
      batch_size: texts per pass; "auto" for 8.
      max_length, seed: as for `SpecjaxLM`.
      device, max_batch_size: given by the harness to every model; JAX chooses the device.
      options: those of `specjax generate` for quantization, drafter and cache, by their names;
        several values as a list.

    Raises:
      ValueError: an option is unknown or does not fit the model.
      FileNotFoundError: a model or a part of it is missing.
    """
    chosen = _parse(pretrained, options)
    params, original = load_target(chosen)
    return {
        "params": params,
        "tokenizer": specjax.load_tokenizer(pretrained),
        "drafter": make_drafter(chosen, params, original),
        "rows": _AUTOMATIC_ROWS if str(batch_size).startswith("auto") else int(batch_size),
        "max_length": max_length,
        "cache_bits": chosen.cache_bits,
        "seed": seed,
    }


def _parse(pretrained: str, options: dict[str, Any]) -> argparse.Namespace:
    """The options as if they stood on the command line."""
    parser = _Parser(prog="--model_args", add_help=False, allow_abbrev=False)
    parser.set_defaults(model=pretrained)
    add_quantize(parser)
    add_drafter(parser)
    add_cache_bits(parser)
    arguments = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif isinstance(value, list | tuple) and name == "draft":
            arguments += [f"{flag}={each}" for each in value]
        elif isinstance(value, list | tuple):
            arguments.append(f"{flag}={','.join(map(str, value))}")
        elif value is not False and value is not None:
            arguments.append(f"{flag}={value}")
    return parser.parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"--model_args: {message}")
