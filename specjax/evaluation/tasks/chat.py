"""MT-Bench (Zheng et al. 2023), its predecessor, and Spec-Bench (Xia et al. 2024), for speed.

The first turn of every conversation, as a question; what a model answers is not judged.
"""

from __future__ import annotations

from specjax.evaluation.json_lines import Line
from specjax.evaluation.tasks.base import Question, WrittenTask, unjudged


def _first_turn(line: Line) -> Question:
    turns = line.get("turns", list)
    if not turns or not isinstance(turns[0], str):
        raise ValueError(f"line {line.number} of {line.path} has no text in turns")
    identity = str(line.fields.get("question_id", line.number))
    return Question(identity, f"Question: {turns[0]}\nAnswer:")


MT_BENCH, VICUNA_BENCH, SPEC_BENCH = (
    WrittenTask(
        name=name, file=f"prompts/{name}.jsonl", read=_first_turn, judge=unjudged, metric=None,
        max_new_tokens=512,
    )
    for name in ("mt_bench", "vicuna_bench", "spec_bench")
)  # fmt: skip
