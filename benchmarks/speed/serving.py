"""Measures `specjax serve`: throughput beside `decode_many`, and what clients wait for.

- throughput: the same prompts through `decode_many` and from as many clients as there are rows, and
  from 32, who ask for whole answers and for streams, in turns; tokens per second are medians, and
  so are a turn's ratios and the processor's time per token. Nothing is kept from one turn to the
  next: no prefixes, and by default a drafter without a memory.
- latency: seconds to the first token, between two events, which may hold several tokens, and per
  token after the first, at several numbers of clients; beside llama.cpp's server, where `--peer`
  names its program, which takes turns on the same GGUF file with as many rows. Medians over the
  turns, each of which has prompts of its own, so that no drafter remembers an answer. llama.cpp
  computes with 8-bit activations.
- prefix: requests that begin with the same long system prompt, one after the other, with and
  without the prefix cache; their outputs are compared.

The server runs in a process of its own; this one holds the clients, on the same cores.

    python -m benchmarks.speed.serving --model smollm2 --json OUT
    python -m benchmarks.speed.serving --model smollm2 --part latency --peer PROGRAM --json OUT
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import specjax
from benchmarks.support.common import parser, table, text_prompts, write
from benchmarks.support.served import (
    Heard,
    Served,
    clients,
    crowd,
    hear,
    llama_cpp_served,
    receive,
    served,
)
from specjax import drafting

KINDS = ("arithmetic", "python", "chat")


def main() -> int:
    options = _options()
    tokenizer = specjax.load_tokenizer(options.model)
    most = options.prompts * (1 + options.repeats * len(options.clients))
    texts = [text for kind in KINDS for text in text_prompts(options.data, kind, most)]
    chosen = np.random.default_rng(0).permutation(len(texts))[:most]
    prompts = [tokenizer.encode(texts[i])[: options.max_prompt] for i in chosen]
    common = [
        options.model, "--rows", str(options.rows), "--queue", "1000", "--name", "model",
        "--drafter", options.drafter,
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    if options.part in (None, "throughput", "latency"):
        with served([*common, "--prefix-memory", "0"]) as running:
            if options.part != "latency":
                rows += _throughput(running, options, prompts[: options.prompts])
            if options.part != "throughput":
                rows += _latency(running, options, prompts)
    if options.part in (None, "prefix"):
        rows += _prefix(options, tokenizer, common)
    print(table(rows, list(dict.fromkeys(name for row in rows for name in row))))
    settings = {"model": options.model, "rows": options.rows, "drafter": options.drafter}
    write(options.json, [settings | row for row in rows])
    return int(any(row.get("differing") for row in rows))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny")
    add("--drafter", default="autoregressive", help="by its name, without a model of its own")
    add("--part", choices=("throughput", "latency", "prefix"), help="measure this alone")
    add("--peer", metavar="PROGRAM", help="llama.cpp's llama-server, for the latency")
    add("--rows", type=int, default=8)
    add("--prompts", type=int, default=64)
    add("--max-prompt", type=int, default=256, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=64)
    add("--clients", type=int, nargs="+", default=[1, 8, 32])
    add("--system", type=int, default=1000, help="tokens of the system prompt")
    add("--alike", type=int, default=64, help="requests behind the system prompt")
    add("--repeats", type=int, default=3)
    return parse.parse_args()


def _body(prompt: Sequence[int], options: Any) -> dict[str, Any]:
    new = options.max_new_tokens
    return {"model": "model", "prompt": list(prompt), "max_tokens": new, "temperature": 0}


def _throughput(
    running: Served, options: Any, prompts: Sequence[list[int]]
) -> list[dict[str, Any]]:
    params = specjax.load(options.model)
    bodies = [_body(prompt, options) for prompt in prompts]

    def library() -> Turn:
        begin, before = time.perf_counter(), time.process_time()
        found = specjax.decode_many(
            params, prompts, rows=options.rows, drafter=drafting.make(options.drafter),
            max_new_tokens=options.max_new_tokens,
        )  # fmt: skip
        tokens = sum(int(each.stats.generated) for each in found)
        seconds = time.perf_counter() - begin
        return Turn(tokens / seconds, (time.process_time() - before) / tokens)

    async def server(count: int, stream: bool) -> Turn:
        before = _processor_seconds(running)
        async with clients(running) as client:
            heard, seconds = await crowd(client, bodies, count, hear if stream else receive)
        tokens = sum(each.tokens for each in heard)
        return Turn(tokens / seconds, (_processor_seconds(running) - before) / tokens)

    library()  # compiles
    _warm_up(running, bodies)
    kinds = [(count, stream) for count in sorted({options.rows, 32}) for stream in (False, True)]
    turns = [
        [library(), *(asyncio.run(server(*kind)) for kind in kinds)] for _ in range(options.repeats)
    ]
    base, *others = zip(*turns, strict=True)
    return [
        {"part": "throughput", "clients": count, "streams": stream, **_beside(own, base)}
        for (count, stream), own in zip(kinds, others, strict=True)
    ]


def _warm_up(running: Served, bodies: Sequence[dict[str, Any]]) -> None:
    """Asks from one client to as many as there are rows, until every program is compiled."""

    async def ask(count: int) -> None:
        async with clients(running) as client:
            await crowd(client, bodies[:count], count)

    for count in range(1, int(running.metric("num_rows")) + 1):
        asyncio.run(ask(count))
        while running.metric("num_programs_to_compile"):
            time.sleep(0.1)


class Turn(NamedTuple):
    """Tokens per second, and the process's seconds on processors per token."""

    speed: float
    cost: float


def _processor_seconds(running: Served) -> float:
    times = running.process.cpu_times()
    return float(times.user + times.system)


def _beside(own: Sequence[Turn], base: Sequence[Turn]) -> dict[str, float]:
    middle = statistics.median
    return {
        "tokens_per_second": middle(each.speed for each in own),
        "decode_many_tokens_per_second": middle(each.speed for each in base),
        "ratio": middle(a.speed / b.speed for a, b in zip(own, base, strict=True)),
        "processor_ms_per_token": 1e3 * middle(each.cost for each in own),
        "decode_many_processor_ms_per_token": 1e3 * middle(each.cost for each in base),
    }


def _latency(running: Served, options: Any, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    bodies, size = [_body(prompt, options) for prompt in prompts], options.prompts
    parts = [bodies[first : first + size] for first in range(0, len(bodies), size)]
    _warm_up(running, parts.pop())

    async def waits(server: Served, count: int, part: list[dict[str, Any]]) -> dict[str, float]:
        async with clients(server, keep_alive=False) as client:
            return _waits(*await crowd(client, part, count))

    with contextlib.ExitStack() as stack:
        servers = {"specjax": running}
        if options.peer is not None:
            context = options.max_prompt + options.max_new_tokens
            servers["llama.cpp"] = stack.enter_context(
                llama_cpp_served(options.peer, options.model, options.rows, context)
            )
        turns = list[dict[tuple[str, int], dict[str, float]]]()
        for _ in range(options.repeats):
            own = [(count, parts.pop()) for count in options.clients]
            turns.append(
                {
                    (name, count): asyncio.run(waits(servers[name], count, part))
                    for count, part in own
                    for name in servers
                }
            )
    return [
        {"part": "latency", "clients": count, "engine": name, "requests": size}
        | {key: statistics.median(turn[name, count][key] for turn in turns) for key in first}
        for (name, count), first in turns[0].items()
    ]


def _waits(heard: Sequence[Heard], seconds: float) -> dict[str, float]:
    first = [each.first for each in heard]
    gaps = [gap for each in heard for gap in each.gaps]
    paces = [sum(each.gaps) / (each.tokens - 1) for each in heard if each.tokens > 1]
    return {
        "tokens_per_second": sum(each.tokens for each in heard) / seconds,
        "first_p50": float(np.percentile(first, 50)),
        "first_p99": float(np.percentile(first, 99)),
        "between_p50": float(np.percentile(gaps, 50)),
        "between_p99": float(np.percentile(gaps, 99)),
        "token_p50": float(np.percentile(paces, 50)),
        "token_p99": float(np.percentile(paces, 99)),
    }


def _prefix(options: Any, tokenizer: Any, common: Sequence[str]) -> list[dict[str, Any]]:
    (prose,) = text_prompts(options.data, "prose", 1)
    system = (tokenizer.encode(prose) * options.system)[: options.system]
    asked = text_prompts(options.data, "arithmetic", options.alike)
    bodies = [_body([*system, *tokenizer.encode(text)[:64]], options) for text in asked]

    async def one_by_one(running: Served) -> list[Heard]:
        async with clients(running) as client:
            return (await crowd(client, bodies, 1))[0]

    found = {}
    for size in ("0", "1"):
        with served([*common, "--prefix-memory", size]) as running:
            found[size] = asyncio.run(one_by_one(running))
    pairs = zip(found["0"], found["1"], strict=True)
    first, *rest = (each.first for each in found["1"])
    read, kept = statistics.median(each.first for each in found["0"][1:]), statistics.median(rest)
    return [{
        "part": "prefix", "requests": len(bodies), "system_tokens": options.system,
        "first_request": first, "first_p50": kept, "first_p50_without": read, "ratio": read / kept,
        "differing": sum(a.text != b.text for a, b in pairs),
    }]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
