"""`specjax chat`: a conversation on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import specjax
from specjax.commands.drafters import add_drafter, make_drafter, read_drafter
from specjax.commands.options import (
    add_cache_bits,
    add_quantize,
    integer,
    load_target,
    unicode_text,
)
from specjax.commands.sampling import add_sampling, chosen_sampling
from specjax.commands.traces import Plain, Trace, legend, without
from specjax.generation.batch import empty_batch
from specjax.generation.batch_rows import Waiting
from specjax.generation.prefix_cache import PrefixCache
from specjax.generation.request import Request, row_sampling
from specjax.generation.streaming import Round, rounds_of
from specjax.generation.text import TextStream

if TYPE_CHECKING:
    from checkpoints_tools.tokenizer import Tokenizer

_CONTEXT = 4096


def add(commands: Any) -> None:
    """Adds the command."""
    help_ = "hold a conversation on the terminal"
    parser = commands.add_parser("chat", help=help_, description=help_)
    add = parser.add_argument
    help_ = 'a directory, a GGUF file, a name on the Hub, or "smollm2" (default)'
    add("model", nargs="?", default="smollm2", metavar="MODEL", help=help_)
    add_quantize(parser)
    add_cache_bits(parser)
    add("--system", type=unicode_text, metavar="TEXT", help="the first message: what to be")
    add("--context", type=integer, metavar="N", help="tokens of the conversation; 4096")
    add("--trace", action="store_true", help="show where each token came from")
    add_drafter(parser)
    add_sampling(parser)
    parser.epilog = "/reset starts a new conversation; the end of the input (Ctrl-D) ends it."
    parser.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> None:
    target = load_target(options.model, options.quantize, options.group_size)
    speaker = _Speaker(
        target.params, specjax.load_tokenizer(options.model),
        make_drafter(read_drafter(options), target), options,
    )  # fmt: skip
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(begin)
    if options.trace:
        print(legend())
    for line in _lines():
        if line == "/reset":
            messages = list(begin)
            print("(new conversation)")
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = speaker.answer(messages)
        except ValueError as error:
            messages.pop()
            print(f"({error})")
        else:
            messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """The lines that the user types. Arrows edit a line and find earlier ones."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401 - `input` uses it
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


class _Speaker:
    """Answers conversations, each behind what it has in common with the last.

    One row of fixed size serves all of them, so that nothing is compiled as they grow.
    """

    def __init__(
        self,
        params: specjax.Params,
        tokenizer: Tokenizer,
        drafter: specjax.Drafter,
        options: argparse.Namespace,
    ) -> None:
        self._params, self._tokenizer, self._turn = params, tokenizer, 0
        positions = params.config.max_position_embeddings
        self._context = min(_CONTEXT, positions) if options.context is None else options.context
        if not 4 <= self._context <= positions:
            raise ValueError(f"--context must be in 4 … {positions}, got {self._context}")
        sampling = chosen_sampling(options)
        self._sampling = jax.tree.map(np.asarray, row_sampling(sampling, 1))
        self._key = jax.random.key(options.seed)
        self._show = Trace if options.trace else Plain
        request = Request.make(params, drafter=drafter, cache_bits=options.cache_bits)
        shared = PrefixCache(outputs=jax.default_backend() == "cpu")
        self._batch = empty_batch(
            params, request, 1, self._context, sampling=self._sampling, prefixes=shared
        )

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Prints the answer as it comes, and returns it. Raises ValueError where the conversation
        has become too long, and where the model fails."""
        text = self._tokenizer.chat(messages)
        prompt = self._tokenizer.encode(text, special_tokens=False)
        if len(prompt) >= self._context:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, and the context {self._context}: "
                "/reset starts a new one"
            )
        stream, stop_tokens = TextStream(self._tokenizer, prompt), self._params.config.stop_tokens
        show, said = self._show(stream), list[int]()
        for each in self._rounds(prompt):
            shown = without(each, stop_tokens)
            said += shown.tokens
            show(shown)
            if each.completion is not None and each.completion.error is not None:
                raise ValueError(each.completion.error)
        show.finish()
        print()
        return self._tokenizer.decode(said)

    def _rounds(self, prompt: list[int]) -> Iterator[Round]:
        """Every round of an answer."""
        batch, self._turn = self._batch, self._turn + 1
        key = None
        if self._sampling is not None:
            key = jax.random.fold_in(self._key, self._turn)[None]
        tokens = np.array(prompt, np.int32)
        batch.add(Waiting(self._turn, tokens, self._context, key, self._sampling))
        while batch.busy:
            batch.fill()
            if batch.running:
                yield rounds_of(batch)[self._turn]
