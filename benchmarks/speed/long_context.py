"""Times drafts that see a part of a long context: SmolLM2 goes on with real texts.

Prompts are passages of tales and of WikiText, and many solved exercises of GSM8K and MBPP in a row,
cut to `--context` tokens. A prompt is read once; then plain decoding and every drafter go on from
the same cache, in turn, each time beginning with another one. Auto has measured costs. `speedup` is
plain decoding's time over the drafter's, from the end of the prompt on; `speedup_read` counts the
reading too. Rows hold the geometric mean over batches, with its 95 % interval by bootstrap. Every
output is compared with plain decoding's. Programs are compiled before.

    python -m benchmarks.speed.long_context --context 7900 --json OUT
    python -m benchmarks.speed.long_context --context 4096 --batch 8 --drafters Auto --json OUT
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.support.common import pad, parser, table, write
from benchmarks.support.instruct import MODEL, target
from benchmarks.support.paired import beside
from benchmarks.support.rounds import finish
from specjax import Drafter, Params, QSpec
from specjax.bench.turns import geometric_mean
from specjax.drafting.calibration import settled
from specjax.generation.decoding import start
from specjax.speculation.state import DecodeState

PLAIN = "plain"
WINDOWS = (256, 512, 1024)
KINDS = ("tales", "encyclopedia", "exercises", "programs")


class Turn(NamedTuple):
    """The tokens that one drafter wrote after a batch of prompts, and the time that it took."""

    seconds: float
    tokens: np.ndarray
    stats: specjax.Stats


def main() -> int:
    options = _options()
    count = options.prompts * len(KINDS)
    if count % options.batch:
        raise ValueError(f"--batch must divide the {count} prompts, got {options.batch}")
    params = target(options.target)
    drafters: dict[str, Drafter] = {
        PLAIN: specjax.Autoregressive(),
        f"QSpec({options.length})": QSpec(options.length),
        **{
            f"QSpec({options.length}), window {window}": QSpec(options.length, window=window)
            for window in WINDOWS
        },
        "Auto": settled(specjax.Auto(), params, options.batch, 16, "a16", options.context),
    }
    for name in options.drafters:
        if name not in drafters:
            raise ValueError(f"--drafters must be of {', '.join(drafters)}, got {name}")
    drafters = {name: drafters[name] for name in (PLAIN, *(options.drafters or drafters))}
    prompts = list(_prompts(options.data, options.context, options.prompts))
    batches = [prompts[i : i + options.batch] for i in range(0, len(prompts), options.batch)]
    turns: list[dict[str, Turn]] = []
    readings = []
    for index, batch in enumerate(batches):
        seconds, state = _read(params, batch, options)
        readings.append(seconds)
        if index == 0:  # compiles every program
            readings[0] = _read(params, batch, options)[0]
            for drafter in drafters.values():
                _write(params, state, drafter)
        order = np.roll(list(drafters), index).tolist()
        turns.append({name: _write(params, state, drafters[name]) for name in order})
        print(f"{index + 1} of {len(batches)} batches", file=sys.stderr, flush=True)
    rows = [_row(name, turns, readings, options) for name in drafters]
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return 0 if all(row["identical"] for row in rows) else 1


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--target", choices=("nested16", "gguf"), default="nested16")
    add("--context", type=int, default=7900, help="tokens of a prompt")
    add("--prompts", type=int, default=4, help="of each kind")
    add("--batch", type=int, default=1)
    add("--drafters", nargs="+", default=[], help="beside plain decoding; default: all")
    add("--length", type=int, default=3, help="tokens per draft")
    add("--max-new-tokens", type=int, default=64)
    return parse.parse_args()


def _prompts(data: Path, length: int, count: int) -> Iterator[list[int]]:
    """`count` prompts of each kind, in turn."""
    tokenizer = specjax.load_tokenizer(MODEL)
    letters = 6 * length  # more than so many tokens have
    for number, kind in itertools.product(range(count), KINDS):
        ids = tokenizer.encode(_text(data, kind, number, letters))[:length]
        assert len(ids) == length, f"{kind} {number} has {len(ids)} tokens"
        yield ids


def _text(data: Path, kind: str, number: int, letters: int) -> str:
    """Passage `number` of a kind."""
    if kind in ("tales", "encyclopedia"):
        name = "GrimmsFairyTales.txt" if kind == "tales" else "wikitext2_valid.txt"
        return (data / "texts" / name).read_text()[number * letters :][:letters]
    name = "gsm8k_train" if kind == "exercises" else "mbpp"
    lines = (data / "prompts" / f"{name}.jsonl").read_text().strip().split("\n")
    solved = [
        f"Question: {item['question']}\nAnswer: {item['answer']}"
        if kind == "exercises"
        else f"# {item['text']}\n{item['code']}"
        for item in map(json.loads, lines[100 * number :] + lines)
    ]
    return "\n\n".join(solved)[:letters]


def _read(params: Params, batch: list[list[int]], options: Any) -> tuple[float, DecodeState]:
    """The state after the prompts, and how long it took to read them."""
    tokens, lengths = pad(batch, options.context)
    begin = time.perf_counter()
    state = start(
        params, tokens, prompt_lengths=jnp.asarray(lengths), max_new_tokens=options.max_new_tokens,
        drafter=specjax.Autoregressive(), stop_tokens=(),
    )  # fmt: skip
    jax.block_until_ready(state)
    return time.perf_counter() - begin, state


def _write(params: Params, read: DecodeState, drafter: Drafter) -> Turn:
    begin = time.perf_counter()
    state = jax.block_until_ready(_finish(params, read, drafter))
    return Turn(time.perf_counter() - begin, np.asarray(state.tokens), state.stats)


@jax.jit
def _finish(params: Params, read: DecodeState, drafter: Drafter) -> DecodeState:
    """Decodes from the end of the prompts on."""
    width = read.tokens.shape[1]
    state = dataclasses.replace(read, draft=drafter.init(params, read, width))
    return finish(params, state, drafter)


def _row(
    name: str, turns: list[dict[str, Turn]], readings: list[float], options: Any
) -> dict[str, Any]:
    own, plain = ([turn[which] for turn in turns] for which in (name, PLAIN))
    whole = [
        (slow.seconds + read) / (fast.seconds + read)
        for slow, fast, read in zip(plain, own, readings, strict=True)
    ]
    return {
        "model": MODEL, "target": options.target, "context": options.context,
        "batch": options.batch, "drafter": name, "prompts": len(turns) * options.batch,
        **beside(own, plain),
        "speedup_read": geometric_mean(whole).mean, "read_seconds": float(np.median(readings)),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
