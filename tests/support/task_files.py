"""A folder of small task files, laid out as docs/evaluation.md describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WORDS = ("apples", "pears", "plums", "nuts", "stones", "coins", "books", "shells")


def write_tasks(folder: Path) -> None:
    """Writes every task's file with one to five items."""
    for name in ("prompts", "texts"):
        (folder / name).mkdir(exist_ok=True)
    _write(folder, "gsm8k_train", [_sum(a, 9 - a) for a in range(1, 9)])
    _write(folder, "gsm8k_test", [_sum(2, 5), _sum(6, 3)])
    _write(folder, "math500", [{"problem": "What is $2 + 2$?", "answer": "4", "unique_id": "a"}])
    _write(folder, "humaneval", [{
        "task_id": "T/0", "prompt": 'def twice(x):\n    """Twice x."""\n', "entry_point": "twice",
        "test": "def check(candidate):\n    assert candidate(3) == 6\n",
    }])  # fmt: skip
    _write(folder, "mbpp", [
        {"task_id": number, "text": "Add two numbers.",
         "code": "def add(a, b):\r\n    return a + b", "test_setup_code": "",
         "test_list": ["assert add(2, 3) == 5", "assert add(0, 0) == 0"]}
        for number in (2, 3, 4, 11, 12)
    ])  # fmt: skip
    _write(folder, "piqa", [
        {"goal": f"count {word}", "sol1": "one by one", "sol2": "all together, with a spoon",
         "label": index % 2} for index, word in enumerate(_WORDS[:5])
    ])  # fmt: skip
    _write(folder, "winogrande", [
        {"context_options": [f"The {word} fell, for the {other}" for other in ("box", "cat")],
         "continuation": "was open.", "gold": 0} for word in _WORDS[:3]
    ])  # fmt: skip
    _write(folder, "mt_bench", [
        {"question_id": 7, "category": "tales", "turns": ["Tell a tale.", "Tell it again."]}
    ])  # fmt: skip
    text = "Once upon a time there was a king who had three daughters. " * 4
    (folder / "texts" / "wikitext2_valid.txt").write_text(text)


def _sum(a: int, b: int) -> dict[str, Any]:
    question = f"Ann has {a} {_WORDS[a - 1]} and gets {b}. How many has she?"
    return {"question": question, "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"}


def _write(folder: Path, name: str, items: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(item) + "\n" for item in items)
    (folder / "prompts" / f"{name}.jsonl").write_text(text)
