"""Times decoding of a model of a billion parameters beside plain decoding, on CPU or GPU.

The model is a small trained one, widened (`benchmarks.support.widen`): real prompts, real
acceptance, and the cost of the large shape. A batch is decoded as a whole by every drafter in turn,
prompts read inside the time, on the same kernels. `speedup` is plain decoding's time over the
drafter's, the geometric mean over batches, with its 95 % interval over them; a nested model is
compared with plain decoding in bfloat16, whose output it has. `Auto`'s costs are measured before,
while nothing else runs, and then all programs are compiled at once; `compile_s` is the first call's
time. Every output is compared with plain decoding's.

    python -m benchmarks.speed.wide --json OUT [--batch 1 8 32] [--cases "Auto, 4 bits"]
    python -m benchmarks.speed.wide --json OUT --temperature 0.7
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.kernels.rates import device_name
from benchmarks.support.common import pad, parser, sampled, table, text_prompts, write
from benchmarks.support.widen import LARGE, widen
from specjax.bench.turns import geometric_mean, take_turns
from specjax.drafting.calibration import calibrate

KINDS = ("arithmetic", "python", "chat", "prose")
# The base of the cases whose names end so. The nested model's is bfloat16, whose output it has.
PLAIN = {
    "4 bits": "plain, 4 bits", "8 bits": "plain, 8 bits",
    "bfloat16": "plain, bfloat16", "nested": "plain, bfloat16",
}  # fmt: skip
Chunk = tuple[np.ndarray, np.ndarray]  # prompts, their lengths


@cache
def exact() -> specjax.Params:
    """The 16-bit model."""
    return widen(specjax.load("tiny-16bit"), **LARGE)


@cache
def four_bits() -> specjax.Params:
    """The same model in 4 bits, the head too."""
    return specjax.quantize(exact(), "rtn", lm_head=True)


@cache
def cast() -> specjax.Params:
    """Its MXFP4 cast, the head too."""
    return specjax.quantize(exact(), "mxfp4", lm_head=True)


@cache
def nested() -> specjax.Params:
    """The 16-bit model in planes: 12 bits that are exact, and 4 that draft."""
    return specjax.quantize(exact(), "nested16", lm_head=True)


@cache
def eight_bits() -> specjax.Params:
    """The same model in 8 bits, the upper 4 of which draft."""
    return specjax.quantize(exact(), "nested8", lm_head=True)


CASES: dict[str, tuple[Callable[[], specjax.Params], Callable[[], specjax.Drafter]]] = {
    "plain, 4 bits": (four_bits, specjax.Autoregressive),
    "QSpec(3) a8, 4 bits": (four_bits, lambda: specjax.QSpec(3, "a8")),
    "QSpec(3) a4, 4 bits": (four_bits, lambda: specjax.QSpec(3, "a4")),
    "ANPD, 4 bits": (four_bits, lambda: specjax.NGram(5)),
    "Auto, 4 bits": (four_bits, specjax.Auto),
    "plain, 8 bits": (eight_bits, specjax.Autoregressive),
    "QSpec(3) a8, 8 bits": (eight_bits, lambda: specjax.QSpec(3, "a8")),
    "Auto, 8 bits": (eight_bits, specjax.Auto),
    "plain, bfloat16": (exact, specjax.Autoregressive),
    "MXFP4 cast, bfloat16": (exact, lambda: specjax.DraftModel(cast(), 4, share_cache=True)),
    "MXFP4 cast a8, bfloat16": (
        exact, lambda: specjax.DraftModel(cast(), 4, "a8", share_cache=True)
    ),
    "ANPD, bfloat16": (exact, lambda: specjax.NGram(5)),
    "Auto, bfloat16": (exact, specjax.Auto),
    "plain, nested": (nested, specjax.Autoregressive),
    "QSpec(3) a8, nested": (nested, lambda: specjax.QSpec(3, "a8")),
    "Auto, nested": (nested, specjax.Auto),
}  # fmt: skip


def main() -> None:
    options = _options()
    tokenizer = specjax.load_tokenizer("tiny-16bit")
    count = -(-max(options.prompts, *options.batch) // len(KINDS))
    texts = [text_prompts(options.data, kind, count) for kind in KINDS]
    ids = [
        tokenizer.encode(text)[: options.max_prompt]
        for each in zip(*texts, strict=True)
        for text in each
    ]
    cases = {name: tuple(make() for make in CASES[name]) for name in options.cases}
    rows = []
    for batch in options.batch:
        rows += _measured(cases, ids, batch, options)
        write(options.json, rows)
        print(table(rows, list(rows[0])), flush=True)


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--batch", type=int, nargs="+", default=[1, 8, 32])
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--prompts", type=int, default=32, help="at least one batch, the kinds in turn")
    add("--max-prompt", type=int, default=96, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=128)
    add("--turns", type=int, default=3)
    add("--temperature", type=float, default=0.0, help="0: greedy")
    return parse.parse_args()


def _measured(cases: Any, ids: list[list[int]], batch: int, options: Any) -> list[dict[str, Any]]:
    """One row per case."""
    chunks = [
        pad(ids[i : i + batch], options.max_prompt)
        for i in range(0, max(options.prompts, batch) - batch + 1, batch)
    ]

    def decode(name: str, chunk: Chunk) -> specjax.DecodeResult:
        params, drafter = cases[name]
        tokens, lengths = chunk
        return specjax.decode(
            params, tokens, prompt_lengths=lengths, drafter=drafter, stop_tokens=(),
            max_new_tokens=options.max_new_tokens, **sampled(options.temperature),
        )  # fmt: skip

    def first(name: str) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(decode(name, chunks[0]))
        return time.perf_counter() - begin

    for params, drafter in cases.values():
        if isinstance(drafter, specjax.Auto):
            calibrate(params, batch)
    with ThreadPoolExecutor() as pool:
        compiled = dict(zip(cases, pool.map(first, cases), strict=True))
    programs = {name: partial(decode, name) for name in cases}
    seconds, outputs = take_turns(programs, chunks, options.turns)
    rows = []
    for name in cases:
        plain = PLAIN[name.split(", ")[1]]
        stats = [output.stats for output in outputs[name]]
        total = {
            each: sum(int(getattr(part, each).sum()) for part in stats)
            for each in ("generated", "rounds", "drafted", "accepted")
        }
        loops = sum(int(part.rounds.max()) for part in stats)
        row = {
            "drafter": name, "batch": batch, "temperature": options.temperature,
            "prompts": len(chunks) * batch,
            "tokens_per_second": total["generated"] * options.turns / float(seconds[name].sum()),
            "tokens_per_round": total["generated"] / total["rounds"],
            "kept": total["accepted"] / max(total["drafted"], 1),
            "round_ms": 1e3 * float(seconds[name].sum()) / options.turns / loops,
            "compile_s": compiled[name], "device": device_name(),
        }  # fmt: skip
        if plain in cases:
            ratios = np.log(seconds[plain] / seconds[name])
            speedup = geometric_mean(np.exp(ratios.mean(axis=0)))
            row |= {
                "speedup": speedup.mean, "speedup_low": speedup.low, "speedup_high": speedup.high,
                "identical": sum(
                    int((np.asarray(a.tokens) == np.asarray(b.tokens)).all(axis=1).sum())
                    for a, b in zip(outputs[name], outputs[plain], strict=True)
                ),
            }  # fmt: skip
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
