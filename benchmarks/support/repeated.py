"""Work that repeats itself: sets of questions to SmolLM2 that come again, with small edits."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import specjax
from benchmarks.support.instruct import MODEL

SETS = ("questions", "code")
PASSES = ("first", "edited", "again")  # "again" asks what "edited" did
EDIT = "Write this code again, with {}.\n\n```python\n{}\n```"


def asked(data: Path, name: str, count: int, longest: int) -> dict[str, list[list[int]]]:
    """Token ids of a set's prompts by pass, `count` each.

    questions: GSM8K's; in the edited ones the first number of one digit is another.
    code: MBPP's solutions, which are to be written again with a docstring, then with comments.
    """
    tokenizer = specjax.load_tokenizer(MODEL)

    def ids(text: str) -> list[int]:
        written = tokenizer.chat([{"role": "user", "content": text}])
        return tokenizer.encode(written, special_tokens=False)

    pairs = ([ids(text) for text in pair] for pair in _pairs(data, name))
    fitting = (pair for pair in pairs if max(map(len, pair)) <= longest)
    first, edited = map(list, zip(*itertools.islice(fitting, count), strict=True))
    return dict(zip(PASSES, (first, edited, edited), strict=True))


def _pairs(data: Path, name: str) -> Iterator[tuple[str, str]]:
    """Texts and how they come again."""
    file = data / "prompts" / ("gsm8k_test.jsonl" if name == "questions" else "mbpp.jsonl")
    for item in map(json.loads, file.read_text().splitlines()):
        if name == "questions":
            text = item["question"]
            edited = re.sub(r"\b[1-9]\b", lambda found: str(int(found[0]) % 9 + 1), text, count=1)
            if edited != text:
                yield text, edited
        else:
            yield EDIT.format("a docstring", item["code"]), EDIT.format("comments", item["code"])
