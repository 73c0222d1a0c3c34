"""Times SmolLM2's GGUF file beside llama.cpp: the same file, prompts and cores, in one run.

read       a prompt of real text, up to its first new token (tokens per second of the prompt)
generate   64 new tokens after prompts of `--context` tokens, the first one apart
first      from the shell to the first new token: the process starts, loads the file, reads a short
           prompt; specjax by `specjax generate`, with its programs compiled by an earlier run
texts      greedy answers to prompts of five kinds: how many are the same, and where they part

The engines take turns, and the median over the rounds counts. llama.cpp computes products of Q4_1
with 8-bit activations. specjax's target computes with 16 bits, and its lines with a drafter give
exactly that text.

    python -m benchmarks.speed.beside_llama_cpp --peer PYTHON --json OUT

`--peer` names the Python of an environment that `benchmarks/peers/install.sh` makes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.support.common import ROOT, pad, parser, table, write
from benchmarks.support.instruct import MODEL, prompts, target
from benchmarks.support.peer_process import LlamaCpp
from checkpoints_tools.sources import locate

PEER = "llama.cpp"
DRAFTERS: dict[str, specjax.Drafter] = {
    "specjax": specjax.Autoregressive(),
    "specjax, Auto": specjax.Auto(),
    "specjax, QSpec": specjax.QSpec(3),
    "specjax, ANPD": specjax.NGram(5),
}
Timed = dict[str, Callable[[], float]]  # seconds of one turn, by the engine's name


def main() -> None:
    options = _options()
    peer = LlamaCpp(options.peer)
    text = (options.data / "texts" / "wikitext2_valid.txt").read_text()
    ids = specjax.load_tokenizer(MODEL).encode(text)
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        rows += {
            "read": lambda: _read(peer, ids, options),
            "generate": lambda: _generate(peer, ids, options),
            "first": lambda: _first(options),
            "texts": lambda: _texts(peer, options),
        }[part]()
        print(table(rows, list(dict.fromkeys(name for row in rows for name in row))), flush=True)
        write(options.json, rows)
    peer.close()


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--peer", required=True, help="the Python that has llama-cpp-python")
    add("--parts", nargs="+", default=["read", "generate", "first", "texts"])
    add("--read", type=int, nargs="+", default=[512, 2048], help="tokens of prompts to read")
    add("--batch", type=int, nargs="+", default=[1, 8], help="texts that are generated at a time")
    add("--context", type=int, default=128, help="tokens of each of their prompts")
    add("--prompts", type=int, default=10, help="prompts per kind for the texts")
    add("--repeats", type=int, default=5)
    return parse.parse_args()


def _decode(
    asked: list[list[int]], drafter: specjax.Drafter, new_tokens: int, stop: tuple[int, ...] | None
) -> specjax.DecodeResult:
    tokens, lengths = pad(asked, max(map(len, asked)))
    return jax.block_until_ready(
        specjax.decode(
            target("gguf"), tokens, prompt_lengths=lengths, drafter=drafter,
            max_new_tokens=new_tokens, stop_tokens=stop,
        )
    )  # fmt: skip


def _seconds(asked: list[list[int]], drafter: specjax.Drafter, new_tokens: int) -> float:
    begin = time.perf_counter()
    _decode(asked, drafter, new_tokens, ())
    return time.perf_counter() - begin


def _turns(timed: Timed, repeats: int) -> dict[str, float]:
    """Each engine's median, after a round to compile and warm up."""
    turns = [{name: run() for name, run in timed.items()} for _ in range(repeats + 1)][1:]
    return {name: statistics.median(turn[name] for turn in turns) for name in timed}


def _read(peer: LlamaCpp, ids: list[int], options: Any) -> list[dict[str, Any]]:
    rows = []
    for length in options.read:
        asked = [ids[:length]]
        seconds = _turns(
            {
                PEER: lambda asked=asked: peer.continued(asked, 1, ())["read_seconds"],
                "specjax": lambda asked=asked: _seconds(asked, DRAFTERS["specjax"], 1),
            },
            options.repeats,
        )
        case = {"part": "read", "batch": 1, "prompt": length}
        rows += [
            {**case, "engine": name, "seconds": each, "tokens_per_second": length / each}
            for name, each in seconds.items()
        ]
    return _beside(rows)


def _generate(peer: LlamaCpp, ids: list[int], options: Any) -> list[dict[str, Any]]:
    """64 tokens after the first; specjax's time for the first is measured apart and taken off.

    That is always plain decoding's, because a drafter's first round may write more than one token.
    """
    rows, new, plain = [], 64, DRAFTERS["specjax"]
    for batch in options.batch:
        starts = range(0, batch * options.context, options.context)
        asked = [ids[start : start + options.context] for start in starts]
        timed: Timed = {
            PEER: lambda asked=asked: peer.continued(asked, new + 1, ())["step_seconds"]
        }
        for name, drafter in DRAFTERS.items():
            timed[name] = lambda asked=asked, drafter=drafter: (
                _seconds(asked, drafter, new + 1) - _seconds(asked, plain, 1)
            )
        seconds = _turns(timed, options.repeats)
        case = {"part": "generate", "batch": batch, "prompt": options.context}
        rows += [
            {**case, "engine": name, "seconds": each, "tokens_per_second": batch * new / each}
            for name, each in seconds.items()
        ]
    return _beside(rows)


def _first(options: Any) -> list[dict[str, Any]]:
    question = "What is the capital of France?"
    tokenizer = specjax.load_tokenizer(MODEL)
    written = tokenizer.chat([{"role": "user", "content": question}])
    module = "benchmarks.peers.llama_cpp_texts"
    commands = {
        PEER: [options.peer, "-m", module, str(locate(MODEL)), "--once", written],
        "specjax": [
            sys.executable, "-m", "specjax.cli", "generate", question, "--chat", "--model", MODEL,
            "--max-new-tokens", "1", "--drafter", "autoregressive",
        ],
    }  # fmt: skip

    def run(command: list[str]) -> float:
        begin = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin

    seconds = _turns(
        {name: lambda command=command: run(command) for name, command in commands.items()},
        options.repeats,
    )
    case = {"part": "first", "batch": 1}
    return _beside([{**case, "engine": name, "seconds": each} for name, each in seconds.items()])


def _texts(peer: LlamaCpp, options: Any) -> list[dict[str, Any]]:
    """How many greedy answers of 64 tokens are the same, by kind, and where the others part."""
    stop = tuple(target("gguf").config.stop_tokens)
    found: dict[str, list[int]] = {}
    for kind, ids in prompts(options.data, options.prompts, 256):
        theirs = peer.continued([ids], 64, stop)["tokens"][0]
        result = _decode([ids], DRAFTERS["specjax"], 64, None)
        ours = np.asarray(result.tokens)[0, len(ids) : int(result.lengths[0])].tolist()
        pairs = zip(ours, theirs, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        found.setdefault(kind, []).append(64 if ours == theirs else same)
    everything = [count for counts in found.values() for count in counts]
    return [
        {
            "part": "texts", "engine": "specjax", "kind": kind, "prompts": len(counts),
            "identical": counts.count(64), "median_same_tokens": statistics.median(counts),
        }
        for kind, counts in {**found, "all": everything}.items()
    ]  # fmt: skip


def _beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their speed beside llama.cpp's of the same case."""
    peers = {(row["batch"], row.get("prompt")): row for row in rows if row["engine"] == PEER}
    for row in rows:
        row["speed_beside_llama_cpp"] = (
            peers[row["batch"], row.get("prompt")]["seconds"] / row["seconds"]
        )
    return rows


if __name__ == "__main__":
    main()
