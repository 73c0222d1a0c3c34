"""`specjax lm-eval`: the command line of lm-evaluation-harness, with specjax among its models.

The harness finds models in a table that other packages cannot extend at installation, so the
command registers specjax at run time and passes its arguments on.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import specjax
from pallas_kernels.cache_entries import check_cache_bits
from specjax.commands.drafters import DrafterOptions, make_drafter
from specjax.commands.options import load_target, read_group_size

_AUTOMATIC_ROWS = 8  # for the harness's --batch_size auto


def add(commands: Any) -> None:
    """Adds the command. The harness reads the arguments that follow its name."""
    help_ = "run lm-evaluation-harness with specjax among its models"
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
    quantize: str | None = None,
    group_size: int | str | None = 128,
    cache_bits: int = 16,
    drafter: str | None = None,
    draft: str | Sequence[str] = (),
    draft_lm_head: bool = False,
    batch_size: int | str = _AUTOMATIC_ROWS,
    max_length: int | None = None,
    seed: int = 0,
    device: str | None = None,
    max_batch_size: int | None = None,
    **fields: object,
) -> dict[str, Any]:
    """Makes the arguments of `SpecjaxLM` from the harness's --model_args.

    Args:
      pretrained: the model, as `specjax.load` takes it.
      quantize, group_size, cache_bits, drafter, draft, draft_lm_head: the options of `specjax
        generate`; several drafts as a list.
      batch_size: texts per pass; "auto" for 8.
      max_length, seed: as for `SpecjaxLM`.
      device, max_batch_size: ignored. The harness gives them to every model; JAX chooses the
        device.
      fields: the drafter's fields, as `specjax.drafting.make` takes them.

    Raises:
      ValueError: an option is unknown or does not fit the model.
      FileNotFoundError: a model or a part of it is missing.
    """
    check_cache_bits(cache_bits)
    chosen = DrafterOptions(
        drafter,
        {name: value for name, value in fields.items() if value is not None},
        [draft] if isinstance(draft, str) else draft,
        draft_lm_head,
    )
    target = load_target(pretrained, quantize, _group_size(group_size))
    return {
        "params": target.params,
        "tokenizer": specjax.load_tokenizer(pretrained),
        "drafter": make_drafter(chosen, target),
        "rows": _AUTOMATIC_ROWS if str(batch_size).startswith("auto") else int(batch_size),
        "max_length": max_length,
        "cache_bits": cache_bits,
        "seed": seed,
    }


def _group_size(given: int | str | None) -> int | None:
    try:
        return read_group_size(str(given).lower())
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"group_size {error}") from None
