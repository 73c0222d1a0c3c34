"""Checks answers that keep to JSON schemas: they are valid, and the same with and without drafts.

Twenty schemas: nested objects, choices, arrays, numbers, text beyond ASCII. A server with a drafter
gets each schema with many prompts, greedy and with a seed, from several clients at a time. Every
answer is compared with `specjax.generate` without any draft, in a batch, and every complete one is
validated by jsonschema.

    python -m benchmarks.exactness.structured --json OUT
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

import jax
import jsonschema

import specjax
from benchmarks.support.common import parser, table, text_prompts, write
from benchmarks.support.schemas import SCHEMAS
from benchmarks.support.served import clients, served

KINDS = ("arithmetic", "python", "prose", "chat")
SAMPLING = {"temperature": 0.9, "top_p": 0.95}


def main() -> int:
    options = _options()
    tokenizer = specjax.load_tokenizer(options.model)
    texts = [text for kind in KINDS for text in text_prompts(options.data, kind, options.each)]
    prompts = [tokenizer.encode(text)[: options.max_prompt] for text in texts]
    asked = [
        (name, prompts[(schema * options.each + number) % len(prompts)], number)
        for schema, name in enumerate(SCHEMAS)
        for number in range(options.each)
    ]
    bodies = [_body(*each, options) for each in asked]
    with served([
        options.model, "--drafter", options.drafter, "--name", "model", "--queue", "1000",
        "--context", "512",
    ]) as running:  # fmt: skip
        answers = asyncio.run(_answers(running, bodies))
        drafts = running.metric("spec_decode_num_draft_tokens_total")
        accepted = running.metric("spec_decode_num_accepted_tokens_total")
    expected = _without_drafts(tokenizer, asked, options)
    rows = [_row(name, asked, answers, expected) for name in SCHEMAS]
    total = {key: sum(row[key] for row in rows) for key in rows[0] if key != "schema"}
    rows.append({"schema": "all", **total, "drafted": int(drafts), "accepted": int(accepted)})
    print(table(rows, list(rows[-1])))
    settings = {"model": options.model, "drafter": options.drafter}
    write(options.json, [settings | row for row in rows])
    return int(any(total[key] for key in ("invalid", "differing", "failed")))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny")
    add("--drafter", default="prompt-lookup")
    add("--each", type=int, default=25, help="requests of each schema")
    add("--max-prompt", type=int, default=60, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=96)
    return parse.parse_args()


def _body(name: str, prompt: list[int], number: int, options: Any) -> dict[str, Any]:
    """Every fifth request is greedy."""
    schema = {"name": "answer", "schema": SCHEMAS[name]}
    return {
        "model": "model", "prompt": prompt, "max_tokens": options.max_new_tokens, "seed": number,
        "response_format": {"type": "json_schema", "json_schema": schema},
        **(SAMPLING if number % 5 else {"temperature": 0}),
    }  # fmt: skip


async def _answers(running: Any, bodies: list[dict[str, Any]]) -> list[Any]:
    """The choice that each request gets; an error's text where it fails."""
    free = asyncio.Semaphore(16)
    async with clients(running) as client:

        async def one(body: dict[str, Any]) -> Any:
            async with free, client.post("/v1/completions", json=body) as answer:
                return (await answer.json())["choices"][0] if answer.ok else await answer.text()

        return await asyncio.gather(*map(one, bodies))


def _without_drafts(tokenizer: Any, asked: list[Any], options: Any) -> list[Any]:
    """The same answers by plain decoding, with masks and no drafts."""
    params = specjax.load(options.model)
    made = {
        name: dataclasses.replace(specjax.Constraint.json_schema(schema, tokenizer), drafts=False)
        for name, schema in SCHEMAS.items()
    }
    expected: list[Any] = [None] * len(asked)
    for greedy in (True, False):
        own = [i for i, (_, _, number) in enumerate(asked) if bool(number % 5) != greedy]
        drawn: dict[str, Any] = {}
        if not greedy:
            keys = [jax.random.fold_in(jax.random.key(asked[i][2]), 0) for i in own]
            drawn = {"sampling": specjax.Sampling(**SAMPLING), "key": jax.numpy.stack(keys)}
        found = specjax.decode_many(
            params, [asked[i][1] for i in own], rows=8, max_new_tokens=options.max_new_tokens,
            drafter=specjax.Autoregressive(), constraint=[made[asked[i][0]] for i in own], **drawn,
        )  # fmt: skip
        for i, each in zip(own, found, strict=True):
            expected[i] = _text(params, tokenizer, each.tokens, len(asked[i][1]))
    return expected


def _text(params: Any, tokenizer: Any, tokens: Any, prompt: int) -> str:
    ids = tokens.tolist()
    stopped = ids[-1] in params.config.stop_tokens
    whole: str = tokenizer.decode(ids[:-1] if stopped else ids)
    return whole.removeprefix(tokenizer.decode(ids[:prompt]))


def _row(name: str, asked: list[Any], answers: list[Any], expected: list[Any]) -> dict[str, Any]:
    own = [i for i, each in enumerate(asked) if each[0] == name]
    whole = [i for i in own if not isinstance(answers[i], str)]
    complete = [i for i in whole if answers[i]["finish_reason"] == "stop"]
    return {
        "schema": name, "requests": len(own), "failed": len(own) - len(whole),
        "complete": len(complete),
        "invalid": sum(not _is_valid(answers[i]["text"], SCHEMAS[name]) for i in complete),
        "differing": sum(answers[i]["text"] != expected[i] for i in whole),
    }  # fmt: skip


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    checker = jsonschema.FormatChecker()
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(
        json.loads(text)
    )


if __name__ == "__main__":
    sys.exit(main())
