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
    _write(folder, "piqa_train", [
        {"goal": f"find {word}", "sol1": "look", "sol2": "sleep", "label": 0}
        for word in _WORDS[:2]
    ])  # fmt: skip
    _write(folder, "winogrande_train", [
        {"context_options": ["The bag holds more than the box, so the bag",
                             "The bag holds more than the box, so the box"],
         "continuation": "was full first.", "gold": 1}
    ])  # fmt: skip
    _write(folder, "gpqa", [
        {"Question": "Which is a prime?\n", "Correct Answer": "7", "Incorrect Answer 1": "8",
         "Incorrect Answer 2": "9", "Incorrect Answer 3": " 10 ", "Record ID": "rec1"}
    ])  # fmt: skip
    news = "The king fell from his horse on Monday. He was not hurt."
    _write(folder, "cnn_dailymail", [{"id": "a1", "article": news, "highlights": "A king fell."}])
    _write(folder, "xsum", [{"id": 3, "document": news, "summary": "A king fell from a horse."}])
    _write(folder, "hagrid", [
        {"query_id": 5, "query": "Who fell?", "quotes": [
            {"idx": 1, "text": "The king fell."}, {"idx": 2, "text": "His horse did not."}]}
    ])  # fmt: skip
    _write(folder, "classeval", [
        {"task_id": "C_0", "skeleton": "class Pair:\n    def swap(self):\n        pass\n"}
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
