"""Checks that a server gives every request the bytes that it gets alone.

For every family of drafters: requests, greedy and with a seed, come in a shuffled order from 1 to
32 clients at a time. Some clients leave in the middle of a stream. Every whole output is compared
with `specjax.generate` for that request alone: without drafts, where a server that takes grammars
draws tokens. Rows in use and open files are counted before and after, and memory after each
quarter. Twelve families with 834 whole responses each are 10,008.

A file is written after every family. The same command on the same commit goes on where it was
stopped.

    python -m benchmarks.exactness.serving --model tiny --responses 834 --json OUT
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

import specjax
from benchmarks.support.common import kept_rows, parser, table, text_prompts, write
from benchmarks.support.served import Heard, Served, clients, hear, served
from specjax.commands.drafters import add_drafter, make_drafter, read_drafter
from specjax.commands.options import load_target
from specjax.serving.grammars import grammars_possible

KINDS = ("arithmetic", "python", "prose")
FAMILIES: dict[str, list[str]] = {
    "auto": [],
    "plain": ["--drafter", "autoregressive"],
    "qspec": ["--drafter", "qspec"],
    "cast": ["--drafter", "draft-model", "--draft", "mxfp4"],
    "cast, shared cache": ["--drafter", "draft-model", "--draft", "mxfp4", "--share-cache"],
    "levels": ["--drafter", "qspec", "--draft", "prompt-lookup"],
    "layer skip": ["--drafter", "layer-skip", "--layers", "0,2,4"],
    "prompt lookup": ["--drafter", "prompt-lookup"],
    "n-grams": ["--drafter", "ngram"],
    "lookahead": ["--drafter", "lookahead"],
    "spectra": ["--drafter", "spectra"],
    "recycling": ["--drafter", "token-recycling"],
}
DRAWN: dict[str, float] = {"temperature": 0.8, "top_p": 0.9}


class Case(NamedTuple):
    """A request, and the text that it gets alone."""

    body: dict[str, Any]
    expected: str


def main() -> int:
    options = _options()
    texts = [text for kind in KINDS for text in text_prompts(options.data, kind, options.prompts)]
    rows = kept_rows(options.json)
    done = {row["drafter"] for row in rows}
    for name, flags in FAMILIES.items():
        if options.only in (None, name) and name not in done:
            rows.append({"model": options.model, "drafter": name} | _family(flags, texts, options))
            write(options.json, rows)
    print(table(rows, list(rows[0])))
    return int(any(row["differing"] or row["rows_left"] for row in rows))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny")
    add("--quantize", default=None, help="quantize the model first")
    add("--only", help="one family of drafters")
    add("--prompts", type=int, default=12, help="prompts of each kind")
    add("--max-prompt", type=int, default=100, help="tokens used of each prompt")
    add("--responses", type=int, default=1000, help="whole ones, per family")
    add("--max-new-tokens", type=int, default=24)
    add("--rows", type=int, default=8)
    add("--context", type=int, default=256)
    return parse.parse_args()


def _family(flags: Sequence[str], texts: Sequence[str], options: Any) -> dict[str, Any]:
    cases = _cases(flags, texts, options)
    jax.clear_caches()
    quantized = [] if options.quantize is None else ["--quantize", options.quantize]
    with served([
        options.model, *flags, *quantized, "--rows", str(options.rows), "--context",
        str(options.context), "--name", "model",
    ]) as running:  # fmt: skip
        return asyncio.run(_compare(running, cases, options.responses))


def _cases(flags: Sequence[str], texts: Sequence[str], options: Any) -> list[Case]:
    """Every prompt, greedy and drawn, by itself in one row, with the same drafter."""
    target = load_target(options.model, options.quantize, 128)
    tokenizer = specjax.load_tokenizer(options.model)
    parse = argparse.ArgumentParser()
    add_drafter(parse)
    drafter = make_drafter(read_drafter(parse.parse_args(flags)), target)
    ids = [tokenizer.encode(text)[: options.max_prompt] for text in texts]
    given = [tokenizer.decode(each) for each in ids]
    seeds = [1000 + number for number in range(len(given))]
    keys = jax.numpy.stack([jax.random.fold_in(jax.random.key(seed), 0) for seed in seeds])
    cases = []
    for fields in ({"temperature": 0.0}, DRAWN):
        own: dict[str, Any] = {"drafter": drafter}
        if fields["temperature"]:
            own |= {"sampling": specjax.Sampling(**fields), "key": keys}
            if grammars_possible(target.params):  # drafts are matched
                own["drafter"] = specjax.Autoregressive()
        alone = specjax.generate(
            target.params, tokenizer, given, rows=1, max_new_tokens=options.max_new_tokens, **own
        )
        for text, seed, each in zip(given, seeds, alone, strict=True):
            body = {
                "model": "model", "prompt": text, "max_tokens": options.max_new_tokens,
                "seed": seed, **fields,
            }  # fmt: skip
            cases.append(Case(body, each.text))
    return cases


async def _compare(running: Served, cases: Sequence[Case], responses: int) -> dict[str, Any]:
    chance, heard = random.Random(0), list[tuple[Case, Heard]]()
    async with clients(running) as client:
        await hear(client, cases[0].body)
        files, memory, begin = running.process.num_fds(), list[int](), time.perf_counter()
        for quarter in range(1, 5):
            while sum(each.whole for _, each in heard) < responses * quarter / 4:
                chosen = chance.choices(cases, k=chance.randint(1, 32))
                leaving = [chance.choice((None,) * 4 + (1, 3)) for _ in chosen]
                found = await asyncio.gather(
                    *(hear(client, c.body, n) for c, n in zip(chosen, leaving, strict=True))
                )
                heard += zip(chosen, found, strict=True)
            memory.append(running.process.memory_info().rss)
        seconds = time.perf_counter() - begin
    await asyncio.sleep(1)
    whole = [(case, each) for case, each in heard if each.whole]
    return {
        "responses": len(whole),
        "left": len(heard) - len(whole),
        "differing": sum(case.expected != each.text for case, each in whole),
        "tokens": sum(each.tokens for _, each in whole),
        "seconds": round(seconds, 1),
        "rows_left": int(running.metric("num_requests_running")),
        "waiting_left": int(running.metric("num_requests_waiting")),
        "files_before": files,
        "files_after": running.process.num_fds(),
        "megabytes_half": memory[1] // 2**20,
        "megabytes_end": memory[3] // 2**20,
    }


if __name__ == "__main__":
    sys.exit(main())
