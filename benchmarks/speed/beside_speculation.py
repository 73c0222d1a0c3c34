"""Times other engines' speculative decoding of SmolLM2 beside ours: whole answers to real prompts.

transformers on torch and specjax decode the model in bfloat16, llama.cpp's server and specjax the
GGUF file as it is. Each engine decodes plainly and with the drafts that need nothing but the model:
transformers by prompt lookup and by its own first half of layers (an early exit), llama.cpp by
n-grams, specjax by `Auto`, its default, and by prompt lookup. Draft lengths are the engines' own
defaults; transformers' prompt lookup, which has none, drafts 10 tokens, as specjax's does.

Every prompt is answered by all cases in turn, one at a time, reading included, each time beginning
with another one. *speedup* is beside the same engine's plain decoding: the geometric mean over
prompts, with its 95 % interval. *beside plain* is tokens per second over those of specjax's plain
decoding of the same weights. *identical* counts the answers that are plain decoding's of the same
engine.

    python -m benchmarks.speed.beside_speculation --peer PYTHON --server PROGRAM --json OUT

`benchmarks/peers/install.sh` installs both. Either may be left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import httpx
import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import pad, parser, table, write
from benchmarks.support.instruct import MODEL, prompts, target
from benchmarks.support.peer_process import Transformers
from benchmarks.support.served import llama_cpp_served
from specjax.bench.turns import geometric_mean, take_turns

WIDTH = 192  # to which specjax's prompts are padded
PLAIN = "plain"
BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "prompt lookup": {"prompt_lookup_num_tokens": 10},
    "early exit": {"assistant_early_exit": 15},
}
BY_LLAMA_CPP = {
    PLAIN: "none",
    "n-grams of the text": "ngram-simple",
    "n-grams, hashed": "ngram-mod",
    "n-grams, counted": "ngram-cache",
}
OURS: dict[str, specjax.Drafter] = {
    PLAIN: specjax.Autoregressive(),
    "Auto": specjax.Auto(),
    "prompt lookup": specjax.PromptLookup(),
}


class Case(NamedTuple):
    """Who decodes which weights, and how tokens are drafted."""

    engine: str
    weights: str
    drafter: str


class Answer(NamedTuple):
    """The tokens that continue a prompt, and the version of what wrote them."""

    tokens: list[int]
    version: str


Answerer = Callable[[list[int]], Answer]


def main() -> None:
    options = _options()
    asked = prompts(options.data, options.prompts, WIDTH)
    with contextlib.ExitStack() as peers:
        cases = dict(_ours(options))
        if options.peer is not None:
            cases |= _transformers(options, peers)
        if options.server is not None:
            cases |= _llama_cpp(options, peers)
        kept = [ids for _, ids in asked]
        for answer in cases.values():  # compiles, and fills caches, with a prompt of no kind
            answer(kept[0][: len(kept[0]) // 2])
        with tqdm(total=len(kept) * len(cases), file=sys.stderr) as bar:
            seconds, outputs = take_turns(_named(cases), kept, ran=bar.update)
    rows = _rows(list(cases), seconds, outputs)
    print(table(rows, list(rows[0])))
    write(options.json, rows)


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--peer", metavar="PYTHON", help="the Python that has transformers")
    add("--server", metavar="PROGRAM", help="llama.cpp's llama-server")
    add("--prompts", type=int, default=20, help="prompts per kind")
    add("--max-new-tokens", type=int, default=64)
    return parse.parse_args()


def _named(cases: dict[Case, Answerer]) -> dict[str, Answerer]:
    return {str(case): answer for case, answer in cases.items()}


def _ours(options: Any) -> Iterator[tuple[Case, Answerer]]:
    for weights in ("bfloat16", "gguf"):
        for name, drafter in OURS.items():
            yield (
                Case("specjax", weights, name),
                partial(_decoded, target(weights), drafter, options.max_new_tokens),
            )


def _decoded(
    params: specjax.Params, drafter: specjax.Drafter, new_tokens: int, prompt: list[int]
) -> Answer:
    tokens, lengths = pad([prompt], WIDTH)
    result = jax.block_until_ready(
        specjax.decode(
            params, tokens, prompt_lengths=lengths, drafter=drafter, max_new_tokens=new_tokens
        )
    )
    found = np.asarray(result.tokens)[0, len(prompt) : int(result.lengths[0])].tolist()
    return Answer(found, specjax.__version__)


def _transformers(options: Any, peers: contextlib.ExitStack) -> dict[Case, Answerer]:
    peer = Transformers(options.peer)
    peers.callback(peer.close)
    stop = tuple(target("gguf").config.stop_tokens)

    def answer(chosen: dict[str, Any], prompt: list[int]) -> Answer:
        return Answer(**peer.continued(prompt, options.max_new_tokens, stop, chosen))

    return {
        Case("transformers", "bfloat16", name): partial(answer, chosen)
        for name, chosen in BY_TRANSFORMERS.items()
    }


def _llama_cpp(options: Any, peers: contextlib.ExitStack) -> dict[Case, Answerer]:
    """A server for each kind of drafts; those that are not asked use no time."""

    def answer(client: httpx.Client, version: str, prompt: list[int]) -> Answer:
        request = {
            "prompt": prompt, "n_predict": options.max_new_tokens, "temperature": 0,
            "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        found = client.post("/completion", json=request).raise_for_status().json()
        return Answer(found["tokens"], version)

    cases: dict[Case, Answerer] = {}
    for name, kind in BY_LLAMA_CPP.items():
        served = peers.enter_context(
            llama_cpp_served(options.server, MODEL, 1, 512, "--spec-type", kind)
        )
        client = peers.enter_context(httpx.Client(base_url=served.url, timeout=600))
        version = f"llama.cpp {client.get('/props').raise_for_status().json()['build_info']}"
        cases[Case("llama.cpp", "gguf", name)] = partial(answer, client, version)
    return cases


def _rows(
    cases: list[Case], seconds: dict[str, np.ndarray], outputs: dict[str, list[Answer]]
) -> list[dict[str, Any]]:
    def speed(case: Case) -> float:
        written = sum(len(answer.tokens) for answer in outputs[str(case)])
        return written / float(seconds[str(case)].sum())

    rows = []
    for case in cases:
        plain, own = str(case._replace(drafter=PLAIN)), str(case)
        speedup = geometric_mean(seconds[plain][0] / seconds[own][0])
        pairs = zip(outputs[own], outputs[plain], strict=True)
        rows.append(
            {
                **case._asdict(), "version": outputs[own][0].version,
                "prompts": len(outputs[own]),
                "speedup": speedup.mean,
                "speedup_low": speedup.low, "speedup_high": speedup.high,
                "tokens_per_second": speed(case),
                "beside_plain": speed(case) / speed(Case("specjax", case.weights, PLAIN)),
                "identical": sum(a.tokens == b.tokens for a, b in pairs),
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
