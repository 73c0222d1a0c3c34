"""MT-Bench (Zheng et al. 2023), its predecessor, and Spec-Bench (Xia et al. 2024), for speed.

Every turn of a conversation is asked after the answers to the turns before it. Answers are not
judged.
"""

from __future__ import annotations

from specjax.evaluation.tasks.written import Question, WrittenTask, unjudged
from specjax.files.json_lines import Line


def _conversation(line: Line) -> Question:
    turns, number = line.texts("turns"), line.fields.get("question_id", line.number)
    if not turns or not all(turns):
        raise ValueError(f"line {line.number} of {line.path} must have texts in turns")
    identity = str(number) if isinstance(number, int) else line.text("question_id")
    return Question(identity, turns[0], later=tuple(turns[1:]))


MT_BENCH, VICUNA_BENCH, SPEC_BENCH = (
    WrittenTask(
        name=name, title=title, file=f"prompts/{name}.jsonl", read=_conversation, judge=unjudged,
        metric=None,
        max_new_tokens=512, frame="Question: {}\nAnswer:",
    )
    for name, title in (
        ("mt_bench", "MT-Bench: conversations of two turns, speed alone"),
        ("vicuna_bench", "Vicuna-Bench: open questions, speed alone"),
        ("spec_bench", "Spec-Bench: six kinds of prompts, speed alone"),
    )
)  # fmt: skip
