"""HumanEval (Chen et al. 2021) and MBPP (Austin et al. 2021): programs, judged by running them.

HumanEval's functions are continued without examples. MBPP's programs follow three worked examples,
its tasks 2 to 4; its tasks from 11 on are counted, as by its authors.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from specjax.evaluation import sandbox
from specjax.evaluation.tasks.written import Question, Verdict, WrittenTask, some_examples
from specjax.files.json_lines import Line

_MBPP = "prompts/mbpp.jsonl"
_EXAMPLES = range(2, 11)  # MBPP's task ids set aside for examples, of which three are customary


def _run(program: str) -> Verdict:
    outcome = sandbox.run(program)
    if not outcome.isolated:
        warnings.warn(
            "this system does not allow namespaces: programs that the model writes can reach the "
            "network and write to your files",
            stacklevel=2,
        )
    return Verdict(outcome.passed, outcome.reason)


def _function(line: Line) -> Question:
    test = f"{line.text('test')}\ncheck({line.text('entry_point')})\n"
    return Question(line.text("task_id"), line.text("prompt"), (line.text("prompt"), test))


def _judge_function(question: Question, answer: str) -> Verdict:
    start, test = question.reference
    return _run(f"{start}{answer}\n{test}")


def _described(line: Line) -> str:
    tests = "".join(f"# {test}\n" for test in line.get("test_list", list))
    return f"# Task: {line.text('text')}\n# Tests:\n{tests}"


def _task(line: Line) -> Question | None:
    number = line.get("task_id", int)
    if number < 11:
        return None
    tests = "\n".join(line.get("test_list", list))
    setup = line.fields.get("test_setup_code", "")
    return Question(str(number), _described(line), (setup, tests))


def _worked_task(line: Line) -> str | None:
    if line.get("task_id", int) not in _EXAMPLES:
        return None
    code = line.text("code").replace("\r\n", "\n").strip()
    return f"{_described(line)}{code}\n# End\n\n"


def _examples(data: Path, shots: int) -> str:
    return some_examples(data / _MBPP, shots, _worked_task)


def _judge_task(question: Question, answer: str) -> Verdict:
    setup, tests = question.reference
    return _run(f"{setup}\n{answer}\n{tests}\n")


HUMANEVAL = WrittenTask(
    name="humaneval", title="HumanEval: Python functions to complete",
    file="prompts/humaneval.jsonl", read=_function, judge=_judge_function,
    metric="pass@1", max_new_tokens=512,
    stops=("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert "),
)  # fmt: skip
MBPP = WrittenTask(
    name="mbpp", title="MBPP: short Python programs", file=_MBPP, read=_task, judge=_judge_task,
    metric="pass@1", max_new_tokens=512,
    stops=("\n# End", "\n# Task:"), shots=3, examples=_examples,
)  # fmt: skip
