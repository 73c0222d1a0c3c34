"""GSM8K (Cobbe et al. 2021): word problems, after eight worked ones of its training part."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from pathlib import Path

from specjax.evaluation.tasks.base import some_examples
from specjax.evaluation.tasks.written import Question, Verdict, WrittenTask
from specjax.files.json_lines import Line

_NUMBER = re.compile(r"-?\$?-?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # annotations such as <<48/2=24>>


def final_number(answer: str) -> Decimal | None:
    """The number after "####"; without one, the last number of the answer."""
    marked = answer.rpartition("####")[2] if "####" in answer else ""
    numbers = _NUMBER.findall(marked)[:1] or _NUMBER.findall(answer)[-1:]
    try:
        return Decimal(numbers[0].replace(",", "").replace("$", "")) if numbers else None
    except InvalidOperation:  # such as "--5"
        return None


def _question(line: Line) -> Question:
    reference = line.text("answer")
    if final_number(reference) is None:
        raise ValueError(f"line {line.number} of {line.path} has no number in answer")
    return Question(str(line.number), f"Question: {line.text('question')}\nAnswer:", reference)


def _example(line: Line) -> str:
    answer = _CALCULATOR.sub("", line.text("answer"))
    return f"Question: {line.text('question')}\nAnswer: {answer}\n\n"


def _examples(data: Path, shots: int) -> str:
    return some_examples(data / "prompts" / "gsm8k_train.jsonl", shots, _example)


def _judge(question: Question, answer: str) -> Verdict:
    found = final_number(answer)
    return Verdict(found == final_number(question.reference), str(found))


GSM8K = WrittenTask(
    name="gsm8k", title="GSM8K: word problems of arithmetic", file="prompts/gsm8k_test.jsonl",
    read=_question, judge=_judge, metric="exact match", max_new_tokens=256,
    stops=("\n\n", "\nQuestion:"), shots=8, examples=_examples,
)  # fmt: skip
