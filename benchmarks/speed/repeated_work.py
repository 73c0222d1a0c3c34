"""Times the memory of texts on work that repeats itself: SmolLM2 answers a set three times.

The first pass asks a set, the second the same set with small edits, the third the edited set again
(`benchmarks.support.repeated`). Prompts come one by one. Plain decoding, Auto, and Auto with a
memory answer each in turn, each time beginning with another one. The memory is empty at first, and
gets every answer; the time that this takes is counted as the decoding's. A ratio is plain
decoding's time over the drafter's; rows hold the geometric mean over prompts, with its 95 %
interval by bootstrap. Every output is compared with plain decoding's. Programs are compiled before.

    python -m benchmarks.speed.repeated_work --set questions --json OUT
    python -m benchmarks.speed.repeated_work --set code --temperature 0.7 --json OUT
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax
from benchmarks.support.common import pad, parser, sampled, table, write
from benchmarks.support.instruct import MODEL, target
from benchmarks.support.paired import beside
from benchmarks.support.repeated import SETS, asked

PLAIN, AUTO, MEMORY = "plain", "Auto", "Auto, memory"


class Answer(NamedTuple):
    """An output, what it cost, and the memory after it."""

    seconds: float
    tokens: np.ndarray
    stats: specjax.Stats
    memory: specjax.SuffixMemory


def main() -> int:
    options = _options()
    params = target(options.target)
    passes = asked(options.data, options.set, options.prompts, options.width)
    empty = memory = specjax.SuffixMemory.create(params.config.vocab_size)
    for name in (PLAIN, AUTO, MEMORY):  # compiles every program
        _answer(params, name, passes["first"][0], empty, options)
    rows = []
    for number, (name, prompts) in enumerate(passes.items()):
        answers: list[dict[str, Answer]] = []
        for index, prompt in enumerate(prompts):
            order = np.roll((PLAIN, AUTO, MEMORY), number + index).tolist()
            found = {each: _answer(params, each, prompt, memory, options) for each in order}
            memory = found[MEMORY].memory
            answers.append(found)
        rows += [_row(name, each, answers, options) for each in (PLAIN, AUTO, MEMORY)]
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return 0 if all(row["identical"] for row in rows) else 1


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--set", choices=SETS, default=SETS[0])
    add("--target", choices=("gguf", "bfloat16"), default="gguf")
    add("--prompts", type=int, default=16)
    add("--width", type=int, default=128, help="to which prompts are padded; longer are left out")
    add("--max-new-tokens", type=int, default=96)
    add("--temperature", type=float, default=0.0, help="0: greedy")
    return parse.parse_args()


def _answer(
    params: specjax.Params, name: str, prompt: list[int], memory: specjax.SuffixMemory, options: Any
) -> Answer:
    tokens, lengths = pad([prompt], options.width)
    begin = time.perf_counter()
    drafters = {PLAIN: specjax.Autoregressive(), AUTO: specjax.Auto()}
    result = specjax.decode(
        params, tokens, prompt_lengths=lengths, max_new_tokens=options.max_new_tokens,
        drafter=drafters.get(name, specjax.Auto(memory=memory)), **sampled(options.temperature),
    )  # fmt: skip
    answer = np.asarray(result.tokens)[0, : int(result.lengths[0])]
    if name == MEMORY:
        memory = jax.block_until_ready(memory.add([answer]))
    return Answer(time.perf_counter() - begin, answer, result.stats, memory)


def _row(passed: str, name: str, answers: list[dict[str, Answer]], options: Any) -> dict[str, Any]:
    own, plain = ([each[which] for each in answers] for which in (name, PLAIN))
    return {
        "model": MODEL, "target": options.target, "set": options.set, "pass": passed,
        "temperature": options.temperature, "drafter": name, "prompts": len(answers),
        **beside(own, plain),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
