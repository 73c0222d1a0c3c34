"""Sets whose answers are not judged, for speed: conversations, sources to answer from, classes.

MT-Bench (Zheng et al. 2023), its predecessor, and Spec-Bench (Xia et al. 2024) are conversations:
every turn is asked after the answers to the turns before it. HAGRID (Kamalloo et al. 2023) asks
questions beside quotes that answer them, and ClassEval (Du et al. 2023) gives a class whose methods
have no bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax.evaluation.tasks.base import identity
from specjax.evaluation.tasks.written import Question, Verdict, WrittenTask
from specjax.files.json_lines import Line


def _unjudged(question: Question, answer: str) -> Verdict:
    return Verdict(None)


def _task(name: str, title: str, read: Callable[[Line], Question], **options: Any) -> WrittenTask:
    return WrittenTask(
        name=name, title=f"{title}, speed alone", file=f"prompts/{name}.jsonl", read=read,
        judge=_unjudged, metric=None, max_new_tokens=512, **options,
    )  # fmt: skip


def _conversation(line: Line) -> Question:
    turns = line.texts("turns")
    if not turns or not all(turns):
        raise ValueError(f"line {line.number} of {line.path} must have texts in turns")
    return Question(identity(line, "question_id"), turns[0], later=tuple(turns[1:]))


def _quoted(line: Line) -> Question:
    quotes = line.get("quotes", list)
    if not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in quotes):
        raise ValueError(f"line {line.number} of {line.path} must have quotes with a text each")
    sources = "".join(f"[{number}] {each['text']}\n" for number, each in enumerate(quotes, start=1))
    prompt = f"{sources}Question: {line.text('query')}\nAnswer:"
    return Question(identity(line, "query_id"), prompt)


def _class(line: Line) -> Question:
    prompt = f"# Complete the class.\n{line.text('skeleton')}\n# The complete class:\n"
    return Question(identity(line, "task_id"), prompt)


_TURNS = {"frame": "Question: {}\nAnswer:"}
MT_BENCH = _task("mt_bench", "MT-Bench: conversations of two turns", _conversation, **_TURNS)
VICUNA_BENCH = _task("vicuna_bench", "Vicuna-Bench: open questions", _conversation, **_TURNS)
SPEC_BENCH = _task("spec_bench", "Spec-Bench: six kinds of prompts", _conversation, **_TURNS)
HAGRID = _task("hagrid", "HAGRID: questions beside quotes", _quoted, stops=("\n\n", "\nQuestion:"))
CLASS_EVAL = _task(
    "classeval", "ClassEval: Python classes to complete", _class, stops=("\n# Complete the class.",)
)
