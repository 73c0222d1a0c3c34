"""Files of prompts: texts, JSON lines, dialogues, and samples of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specjax.commands.prompts import read_prompts
from specjax.evaluation.samples import sample


def _said(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def _written(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


SHAREGPT = [
    {"conversations": [_said("human", "Hi"), _said("gpt", "Yes")]},
    {"conversations": [_said("gpt", "Lost"), _said("human", "Go")]},
    {"conversations": []},
    {"conversations": [_said("gpt", "Alone")]},
]
LMSYS = [{"conversation": [_written("user", "Hi"), _written("assistant", "Yes")]}]
MT_BENCH = [{"turns": ["Hi", "And then?"], "question_id": 81}]
OPENAI = [{"messages": [_written("system", "Be kind"), _written("user", "Hi")]}]


def _lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.mark.parametrize(
    ("objects", "prompts"),
    [
        (SHAREGPT, ["Hi", "Go"]), (LMSYS, ["Hi"]), (MT_BENCH, ["Hi"]), (OPENAI, ["Hi"]),
        ([{"question": "Hi", "turns": ["No"]}], ["Hi"]),
    ],
)  # fmt: skip
def test_a_prompt_is_the_users_first_message(objects, prompts: list[str], tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(_lines(objects))
    (tmp_path / "set.json").write_text(json.dumps(objects))
    (tmp_path / "set.json.gz").write_bytes(gzip.compress(json.dumps(objects).encode()))
    for name in ("set.jsonl", "set.json", "set.json.gz"):
        assert read_prompts(tmp_path / name) == prompts


def test_lines_of_text(tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_text("one\n\ntwo\nthree\n")
    assert read_prompts(tmp_path / "set.txt") == ["one", "two", "three"]
    assert read_prompts(tmp_path / "set.txt", 2) == ["one", "two"]


def test_a_seed_decides_the_sample() -> None:
    items = list(range(1000))
    chosen = sample(items, 50, 42)
    assert chosen == sample(items, 50, 42) == sorted(set(chosen)) and len(chosen) == 50
    assert chosen != sample(items, 50, 43) and max(chosen) > 900
    assert (
        sample(items, 2) == [0, 1] and sample(items, None, 42) == sample(items, 2000, 42) == items
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("set.json", '{"prompt": "a"}', "set.json must hold a JSON list, got {'prompt': 'a'}"),
        ("set.json", "[1]", "line 1 of .*set.json has no text in any of prompt, question, text"),
        ("set.json", "[", "set.json is not valid JSON"),
        ("set.jsonl", '{"conversations": 1}\n', "line 1 of .*set.jsonl has no text in any of"),
    ],
)
def test_other_files_are_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)
