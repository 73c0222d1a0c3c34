"""Times decoding of a model of a billion parameters beside plain decoding, on CPU or GPU.

The model is a small trained one, widened (`benchmarks.support.widen`): real prompts, real
acceptance, and the cost of the large shape. A batch is decoded as a whole by every drafter in turn,
prompts read inside the time, on the same kernels. `speedup` is plain decoding's time over the
drafter's, the geometric mean over batches, with its 95 % interval over them; a nested model is
compared with plain decoding in bfloat16, whose output it has. `Auto`'s costs are measured before,
while nothing else runs, and then all programs are compiled at once. Every output is compared with
plain decoding's. A file is written after every batch, and the same command on the same commit goes
on where it was stopped.

    python -m benchmarks.speed.wide --json OUT [--batch 1 8 32] [--cases "Auto, 4 bits"]
    python -m benchmarks.speed.wide --json OUT --temperature 0.7
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.kernels.rates import device_name
from benchmarks.support import gpu_tables
from benchmarks.support.common import kept_rows, pad, parser, sampled, text_prompts, write
from benchmarks.support.widen import LARGE, widen
from specjax.bench.turns import geometric_mean, take_turns
from specjax.drafting.calibration import calibrate

KINDS = ("arithmetic", "python", "chat", "prose")
# The base of the cases whose names end so. The nested model's is bfloat16, whose output it has.
PLAIN = {
    "4 bits": "plain, 4 bits", "8 bits": "plain, 8 bits",
    "bfloat16": "plain, bfloat16", "nested": "plain, bfloat16",
}  # fmt: skip
COUNTED = ("prompts", "generated", "rounds", "drafted", "accepted", "passes", "seconds")
Chunk = tuple[np.ndarray, np.ndarray]  # prompts, their lengths
Cases = Mapping[str, tuple[specjax.Params, specjax.Drafter]]
Rows = list[dict[str, Any]]


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
    cases = {name: (CASES[name][0](), CASES[name][1]()) for name in options.cases}
    for batch in options.batch:
        last = max(options.prompts, batch) - batch
        chunks = [pad(ids[i : i + batch], options.max_prompt) for i in range(0, last + 1, batch)]
        sizes = {"batch": batch, "temperature": options.temperature, "device": device_name()}
        rows = _measure(cases, chunks, sizes, options)
    print(gpu_tables.wide(rows))


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


def _measure(cases: Cases, chunks: list[Chunk], sizes: dict[str, Any], options: Any) -> Rows:
    """Rows of one batch size, written after every chunk; chunks in the file are not run again."""
    kept = kept_rows(options.json)
    others = [row for row in kept if row["batch"] != sizes["batch"]]
    rows = [row for row in kept if row["batch"] == sizes["batch"]]
    if rows and [row["drafter"] for row in rows] != [*cases]:
        raise SystemExit(f"--cases must be those of {options.json}, or --json another file")
    rows = rows or [{"drafter": name, **sizes, **dict.fromkeys(COUNTED, 0)} for name in cases]
    done = rows[0]["prompts"] // sizes["batch"]
    if done < len(chunks):
        decode = partial(_decode, cases, options)
        _prepare(cases, partial(decode, chunk=chunks[done]), sizes["batch"])
    for place in tqdm(range(done, len(chunks)), file=sys.stderr):
        first = place % len(cases)
        names = [*cases][first:] + [*cases][:first]
        programs = {name: partial(decode, name) for name in names}
        seconds, outputs = take_turns(programs, [chunks[place]], options.turns)
        means = {name: float(each.mean()) for name, each in seconds.items()}
        for row in rows:
            _add(row, means, {name: output for name, (output,) in outputs.items()})
        write(options.json, others + rows)
    return others + rows


def _decode(cases: Cases, options: Any, name: str, chunk: Chunk) -> specjax.DecodeResult:
    params, drafter = cases[name]
    tokens, lengths = chunk
    return specjax.decode(
        params, tokens, prompt_lengths=lengths, drafter=drafter, stop_tokens=(),
        max_new_tokens=options.max_new_tokens, **sampled(options.temperature),
    )  # fmt: skip


def _prepare(cases: Cases, decode: Callable[[str], specjax.DecodeResult], batch: int) -> None:
    """Measures the costs that `Auto` decides by, then compiles everything at once."""
    for params, drafter in cases.values():
        if isinstance(drafter, specjax.Auto):
            calibrate(params, batch)
    with ThreadPoolExecutor() as pool:
        jax.block_until_ready(list(pool.map(decode, cases)))


def _add(
    row: dict[str, Any], seconds: dict[str, float], outputs: dict[str, specjax.DecodeResult]
) -> None:
    """Adds one chunk to the row of its drafter: `seconds` are means over the turns."""
    name = row["drafter"]
    output, stats = outputs[name], outputs[name].stats
    for count in ("generated", "rounds", "drafted", "accepted"):
        row[count] += int(getattr(stats, count).sum())
    row["prompts"] += row["batch"]
    row["passes"] += int(stats.rounds.max())
    row["seconds"] += seconds[name]
    row |= {
        "tokens_per_second": row["generated"] / row["seconds"],
        "tokens_per_round": row["generated"] / row["rounds"],
        "kept": row["accepted"] / max(row["drafted"], 1),
        "round_ms": 1e3 * row["seconds"] / row["passes"],
    }
    plain = PLAIN[name.split(", ")[1]]
    if plain in outputs:
        same = (np.asarray(output.tokens) == np.asarray(outputs[plain].tokens)).all(axis=1)
        row["identical"] = row.get("identical", 0) + int(same.sum())
        row["by_chunk"] = [*row.get("by_chunk", ()), round(seconds[plain] / seconds[name], 4)]
        speedup = geometric_mean(row["by_chunk"])
        row |= {"speedup": speedup.mean, "speedup_low": speedup.low, "speedup_high": speedup.high}


if __name__ == "__main__":
    main()
