"""`specjax generate`: continues a text, and shows where each token came from."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import numpy as np

import specjax
from specjax.commands.drafters import add_drafter, make_drafter, read_drafter
from specjax.commands.memory import add_memory, keep, with_memory
from specjax.commands.options import (
    add_cache_bits,
    add_model,
    add_quantize,
    chosen_target,
    integer,
    unicode_text,
)
from specjax.commands.sampling import add_sampling, chosen_sampling
from specjax.commands.traces import Plain, Trace, legend, summary, without
from specjax.drafting import Drafter
from specjax.files.json_objects import read_object
from specjax.generation.streaming import Round, stream
from specjax.generation.text import TextStream

if TYPE_CHECKING:
    from checkpoints_tools.tokenizer import Tokenizer


class _Settings(TypedDict):
    """Options that `stream` and `generate` share."""

    max_new_tokens: int
    drafter: Drafter
    sampling: specjax.Sampling | None
    key: jax.Array | None
    cache_bits: int
    logprobs: int | None
    constraint: specjax.Constraint | None


def add(commands: Any) -> None:
    """Adds the command."""
    help_ = "continue a text, drafting and verifying"
    _add_generate(commands.add_parser("generate", help=help_, description=help_))


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("text", type=unicode_text, help="the text to continue")
    add_model(parser)
    add_quantize(parser)
    add_cache_bits(parser)
    add("--chat", action="store_true", help="put the text into the model's chat template")
    add(
        "--max-new-tokens",
        type=integer,
        default=128,
        metavar="N",
        help="most tokens to generate; 128 if left out",
    )
    add(
        "--stop",
        type=unicode_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeatable",
    )
    grammar = parser.add_mutually_exclusive_group().add_argument
    grammar("--json-schema", type=Path, metavar="FILE", help="keep to the JSON schema in this file")
    grammar("--regex", type=unicode_text, metavar="X", help="keep to a regular expression")
    add("--trace", action="store_true", help="show where each token came from")
    add(
        "--logprobs",
        type=integer,
        metavar="K",
        help="list the log-probability of every token, and the K most probable ones",
    )
    add_memory(parser)
    add_drafter(parser)
    add_sampling(parser)
    parser.add_argument(
        "--samples", type=integer, metavar="N", help="print N outputs instead of one"
    )
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    if "" in options.stop:
        raise ValueError("--stop must name a text, got an empty one")
    sampling = chosen_sampling(options)
    if options.samples is not None:
        _check_samples(options, sampling)
    target = chosen_target(options)
    params = target.params
    tokenizer = specjax.load_tokenizer(options.model)
    drafter = with_memory(make_drafter(read_drafter(options), target), params, options.memory)
    settings: _Settings = {
        "max_new_tokens": options.max_new_tokens,
        "drafter": drafter,
        "sampling": sampling,
        "key": jax.random.key(options.seed) if sampling else None,
        "cache_bits": options.cache_bits,
        "logprobs": options.logprobs,
        "constraint": _constraint(options, tokenizer),
    }
    print_ = _print_one if options.samples is None else _print_samples
    keep(params, print_(options, params, tokenizer, settings), options.memory)


def _print_one(
    options: argparse.Namespace,
    params: specjax.Params,
    tokenizer: Tokenizer,
    settings: _Settings,
) -> list[list[int]]:
    """Prints one output as it comes. Returns its tokens after those of the prompt."""
    prompt = _prompt(options, tokenizer)
    first = begun = time.perf_counter()
    rounds = stream(params, prompt, **settings)
    text = TextStream(tokenizer, prompt, options.stop)
    show = (Trace if options.trace else Plain)(text)
    seen: list[Round] = []
    print(_asked(options), end="", flush=True)
    for each in rounds:
        if not seen:
            first = time.perf_counter()  # the first round waits for the compiler
        seen.append(each)
        show(without(each, params.config.stop_tokens))
        if text.ended:
            break
    show.finish()
    seconds = time.perf_counter() - first
    print(f"\n\n{summary(seen, seconds, first - begun)}")
    if options.trace:
        print(legend())
    tokens = [token for each in seen for token in each.tokens]
    if options.logprobs is not None:
        parts = [each.logprobs for each in seen]
        _print_logprobs(
            tokenizer, tokens, jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        )
    return [prompt + tokens]


def _check_samples(options: argparse.Namespace, sampling: specjax.Sampling | None) -> None:
    if options.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {options.samples}")
    if sampling is None:
        raise ValueError("--samples needs an option of sampling, for example --temperature 0.8")
    if options.trace:
        raise ValueError("--trace shows one output as it comes; leave out --samples")


def _print_samples(
    options: argparse.Namespace,
    params: specjax.Params,
    tokenizer: Tokenizer,
    settings: _Settings,
) -> list[list[int]]:
    """Prints several outputs once all of them are there. Returns their tokens as `_print_one`."""
    prompt = [{"role": "user", "content": options.text}] if options.chat else options.text
    found = specjax.generate(
        params, tokenizer, prompt, samples=options.samples, stop=options.stop, **settings
    )
    for number, each in enumerate(found, 1):
        print(f"[{number}] {_asked(options)}{each.text}\n")
        if each.logprobs is not None:
            _print_logprobs(tokenizer, each.tokens.tolist(), each.logprobs)
            print()
    return [_prompt(options, tokenizer) + each.tokens.tolist() for each in found]


def _print_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: specjax.Logprobs
) -> None:
    """One line per token: its id, text and log-probability, and the most probable tokens."""

    def shown(token: int) -> str:
        return repr(tokenizer.decode([token]))  # a terminal would obey characters of control

    texts = [shown(token) for token in tokens]
    width = max(5, *map(len, texts))
    print(f"{'id':>7}  {'token':<{width}}  logprob  most probable")
    for place, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        top = zip(logprobs.top_tokens[place], logprobs.top_logprobs[place], strict=True)
        others = ", ".join(f"{shown(int(each))} {value:.2f}" for each, value in top)
        own = logprobs.tokens[place]
        print(f"{token:>7}  {text:<{width}}  {own:>7.2f}  {others}".rstrip())


def _asked(options: argparse.Namespace) -> str:
    """The text as it stands before the output: a question is not part of its answer."""
    text: str = options.text
    return f"{text}\n\n" if options.chat else text


def _prompt(options: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """The text's tokens; with --chat those of the chat template around it."""
    if not options.chat:
        return tokenizer.encode(options.text)
    text = tokenizer.chat([{"role": "user", "content": options.text}])
    return tokenizer.encode(text, special_tokens=False)


def _constraint(options: argparse.Namespace, tokenizer: Tokenizer) -> specjax.Constraint | None:
    """The grammar that the output keeps to; None where no option names one."""
    if options.json_schema is not None:
        schema = read_object(options.json_schema)
        return specjax.Constraint.json_schema(schema, tokenizer)
    if options.regex is not None:
        return specjax.Constraint.regex(options.regex, tokenizer)
    return None
