"""`specjax bench`: drafters × draft lengths × batch sizes × prompts × models; and its tables."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import specjax
from specjax.bench import Subject, bench, read_cells
from specjax.bench.environment import environment
from specjax.bench.table import format_cells
from specjax.bench.texts import SHIPPED
from specjax.commands.drafters import make_drafter, read_written, with_lengths
from specjax.commands.options import (
    Target,
    add_cache_bits,
    add_output,
    add_quantize,
    add_sample_seed,
    at_least,
    integer,
    load_target,
)
from specjax.commands.prompts import read_prompts
from specjax.evaluation.progress_bar import progress_bar
from specjax.evaluation.samples import sample
from specjax.generation.text import ChatTokenizer

_ANY = ("auto", "prompt-lookup", "ngram", "spectra:window=2,guesses=2")
_QUANTIZED = ("qspec", *_ANY)
_PLAIN = ("draft-model:share_cache=true,activation=a8+mxfp4", *_ANY)

_log = logging.getLogger(__name__)


class _Usual(NamedTuple):
    """The choices where options are left out."""

    models: Sequence[str] = ("tiny",)
    drafters: Sequence[str] | None = None
    rows: Sequence[int] = (1,)
    prompts: Mapping[str, Sequence[str]] = SHIPPED
    limit: int | None = None
    max_new_tokens: int = 64
    turns: int = 3


_USUAL = _Usual()
_QUICK = _Usual(
    drafters=("qspec", "ngram", "spectra:window=2,guesses=2"),
    rows=(1, 4),
    prompts={name: SHIPPED[name] for name in ("stories", "code")},
    turns=2,
)


def add(commands: Any) -> None:
    """Adds the command, and the one that makes tables of its results."""
    help_ = "time drafters beside plain decoding"
    more = "specjax bench table FILE … prints tables of the results of earlier runs."
    parser = commands.add_parser("bench", help=help_, description=help_, epilog=more)
    add = parser.add_argument
    help_ = 'models: directories, GGUF files, names on the Hub, or "smollm2"; "tiny" if left out'
    add("--models", nargs="+", metavar="MODEL", help=help_)
    add_quantize(parser)
    add_cache_bits(parser)
    help_ = (
        "drafters as NAME:OPTION=VALUE,…+MODEL_OR_METHOD, such as qspec:draft_length=5 or "
        "draft-model:share_cache=true+mxfp4; a choice for the model if left out"
    )
    add("--drafters", nargs="+", metavar="DRAFTER", help=help_)
    add("--draft-lm-head", action="store_true", help="quantize the output head of casts too")
    help_ = "tokens per draft, for each drafter that has a draft_length and is given none"
    add("--draft-lengths", nargs="+", type=integer, default=(), metavar="N", help=help_)
    add("--rows", nargs="+", type=integer, metavar="N", help="batch sizes; 1 if left out")
    help_ = (
        "sets of prompts: JSON lines, a JSON list, or one text per line; short ones that ship with "
        "specjax if left out"
    )
    add("--prompts", nargs="+", type=_named_file, metavar="[NAME=]FILE", help=help_)
    add("--chat", action="store_true", help="put the prompts into the model's chat template")
    help_ = "prompts per set, the first ones; all if left out"
    add("--limit", type=at_least(1), metavar="N", help=help_)
    for name, what in (
        ("--longest-prompt", "leave out prompts of more tokens; 256 if left out"),
        ("--max-new-tokens", "most tokens per answer; 64 if left out"),
        ("--turns", "how often all prompts are answered; 3 if left out"),
    ):
        add(name, type=integer, metavar="N", help=what)
    add_sample_seed(parser)
    help_ = "what three minutes on two cores can show, unless options say otherwise"
    add("--quick", action="store_true", help=help_)
    help_ = "write results to this file; a killed run continues from it"
    add_output(parser, "--out", metavar="FILE", help=help_)
    parser.set_defaults(run=_bench)
    kinds = parser.add_subparsers(title="earlier results", metavar="ACTION")
    help_ = "print tables in Markdown, the smallest speed-up first"
    table = kinds.add_parser("table", help=help_, description=help_)
    table.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of bench --out")
    table.set_defaults(run=_table)


def _named_file(text: str) -> tuple[str, Path]:
    name, sign, file = text.rpartition("=")
    return (name if sign else Path(file).stem), Path(file)


def _table(options: argparse.Namespace) -> None:
    print(format_cells([read_cells(file) for file in options.files]))


def _bench(options: argparse.Namespace) -> None:
    usual = _QUICK if options.quick else _USUAL
    given = {name: getattr(options, name) for name in _Usual._fields}
    chosen = usual._replace(**{name: value for name, value in given.items() if value is not None})
    prompts = _read(chosen, options.sample_seed)
    subjects = [_subject(name, chosen, prompts, options) for name in chosen.models]
    with progress_bar("answer") as progress:
        cells = bench(
            subjects, rows=chosen.rows, max_new_tokens=chosen.max_new_tokens, turns=chosen.turns,
            cache_bits=options.cache_bits, out=options.out, progress=progress,
        )  # fmt: skip
    settings = {"max_new_tokens": chosen.max_new_tokens, "cache_bits": options.cache_bits}
    print(format_cells([(environment() | settings, cells)]))


def _read(chosen: _Usual, sample_seed: int | None) -> dict[str, Sequence[str]]:
    """The prompts of every set, as texts. Raises ValueError where two sets have one name."""
    if isinstance(chosen.prompts, Mapping):
        sets = list(chosen.prompts.items())
    else:
        sets = [(name, read_prompts(file)) for name, file in chosen.prompts]
    names = [name for name, _ in sets]
    if len(set(names)) < len(names):
        raise ValueError(f"--prompts must have different names, got {', '.join(names)}")
    return {name: sample(texts, chosen.limit, sample_seed) for name, texts in sets}


def _subject(
    name: str, chosen: _Usual, prompts: Mapping[str, Sequence[str]], options: argparse.Namespace
) -> Subject:
    """The model of that name with the drafters and the prompts of every set."""
    target = load_target(name, options.quantize, options.group_size)
    written = chosen.drafters or (_QUANTIZED if target.params.quantized else _PLAIN)
    longest = 256 if options.longest_prompt is None else options.longest_prompt
    return Subject(
        name=f"{name}, {options.quantize}" if options.quantize else name,
        params=target.params,
        drafters=_drafters(written, target, options),
        texts={each: _tokens(each, texts, name, longest, options.chat)
               for each, texts in prompts.items()},
    )  # fmt: skip


def _drafters(
    written: Sequence[str], target: Target, options: argparse.Namespace
) -> dict[str, specjax.Drafter]:
    """The drafters by what was written, those with a length once for each of --draft-lengths."""
    names = [name for text in written for name in with_lengths(text, options.draft_lengths)]
    if len(set(names)) < len(names):
        raise ValueError(f"--drafters must be different ones, got {' '.join(names)}")
    return {name: make_drafter(read_written(name, options.draft_lm_head), target) for name in names}


def _tokens(name: str, texts: Sequence[str], model: str, longest: int, chat: bool) -> list[Any]:
    """The prompts of one set as token ids, without those that are too long."""
    tokenizer = specjax.load_tokenizer(model)
    if chat and not isinstance(tokenizer, ChatTokenizer):
        raise ValueError(f"--chat needs a model with a chat template, got {model}")
    ids = [
        tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]), special_tokens=False)
        if chat
        else tokenizer.encode(text)
        for text in texts
    ]
    kept = [each for each in ids if len(each) <= longest]
    if len(kept) < len(ids):
        _log.info(f"{len(ids) - len(kept)} of {len(ids)} prompts of {name} are left out: "
                  f"they have more than {longest} tokens")  # fmt: skip
    return kept
