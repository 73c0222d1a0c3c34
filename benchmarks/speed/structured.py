"""Times calls of tools that keep to JSON schemas: SmolLM2, with and without the grammar's drafts.

Every request is answered in turn by plain decoding under the schema, with the tokens that the
grammar forces as drafts, with those above Auto, and by plain decoding that is free, each time
beginning with another one. A ratio is the time of plain decoding under the schema over the case's;
rows hold the geometric mean over requests, with its 95 % interval by bootstrap. Prompts are read
inside the time. Outputs under the schema are compared, and complete ones are validated. Programs
are compiled before.

    python -m benchmarks.speed.structured --json OUT
    python -m benchmarks.speed.structured --temperature 0.7 --json OUT
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from functools import cache
from typing import Any, NamedTuple

import jax
import jsonschema
import numpy as np

import specjax
from benchmarks.support.common import parser, table, write
from benchmarks.support.instruct import MODEL, target
from benchmarks.support.paired import beside
from benchmarks.support.tools import INSTRUCTION, TOOLS, Tool

PLAIN, FORCED, AUTO, FREE = "plain", "forced tokens", "forced tokens, Auto", "plain, free"


class Answer(NamedTuple):
    """An output, whether it is complete, and what it cost."""

    seconds: float
    tokens: np.ndarray
    complete: bool
    valid: bool
    stats: specjax.Stats


def main() -> int:
    options = _options()
    asked = [(tool, each) for tool in TOOLS[: options.tools] for each in tool.requests]
    names = (PLAIN, FORCED, AUTO, FREE)
    for name in names:
        _answer(name, *asked[0], options)  # compiles every program
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    for number, pair in enumerate(asked):
        for name in np.roll(names, number).tolist():
            answers[name].append(_answer(name, *pair, options))
    rows = [_row(name, answers, options) for name in names]
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return 0 if all(row["identical"] and row["valid"] for row in rows if row["constrained"]) else 1


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--target", choices=("gguf", "bfloat16"), default="gguf")
    add("--tools", type=int, default=len(TOOLS))
    add("--max-new-tokens", type=int, default=96)
    add("--temperature", type=float, default=0.0, help="0: greedy")
    return parse.parse_args()


@cache
def _tokenizer() -> Any:
    return specjax.load_tokenizer(MODEL)


def _answer(name: str, tool: Tool, request: str, options: Any) -> Answer:
    tokenizer = _tokenizer()
    made = specjax.Constraint.json_schema(tool.schema, tokenizer)
    chosen: dict[str, Any] = {}
    if name != FREE:
        chosen["constraint"] = dataclasses.replace(made, drafts=name != PLAIN)
    if options.temperature:
        chosen["sampling"] = specjax.Sampling(temperature=options.temperature)
        chosen["key"] = jax.random.key(0)
    text = INSTRUCTION.format(tool.name, request)
    begin = time.perf_counter()
    output = specjax.generate(
        target(options.target), tokenizer, [{"role": "user", "content": text}], rows=1,
        max_new_tokens=options.max_new_tokens,
        drafter=specjax.Auto() if name == AUTO else specjax.Autoregressive(), **chosen,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    complete = output.finish == "stop"
    valid = not complete or (name != FREE and _is_valid(output.text, tool.schema))
    return Answer(seconds, output.tokens, complete, valid, output.stats)


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    checker = jsonschema.FormatChecker()
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(
        json.loads(text)
    )


def _row(name: str, answers: dict[str, list[Answer]], options: Any) -> dict[str, Any]:
    own, plain = answers[name], answers[PLAIN]
    return {
        "model": MODEL, "target": options.target, "temperature": options.temperature,
        "drafter": name, "constrained": name != FREE, "requests": len(own), **beside(own, plain),
        "complete": sum(each.complete for each in own), "valid": all(each.valid for each in own),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
