"""HumanEval (Chen et al. 2021) and MBPP (Austin et al. 2021): programs, judged by running them.

HumanEval's functions are continued without examples. MBPP's programs follow three worked examples,
its tasks 2 to 4; its tasks from 11 on are counted, as by its authors.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import symtable
import warnings
from functools import partial
from pathlib import Path

from specjax.checks import printable
from specjax.evaluation import sandbox
from specjax.evaluation.sandbox import Program
from specjax.evaluation.tasks.base import some_examples
from specjax.evaluation.tasks.written import Question, Verdict, WrittenTask
from specjax.files.json_lines import Line

_MBPP = "prompts/mbpp.jsonl"
_EXAMPLES = range(2, 11)  # MBPP's task ids set aside for examples, of which three are customary


def _judge(question: Question, answer: str, *, unsafe: bool = False) -> Verdict:
    """Runs the answer as the end of the question's program."""
    program: Program = question.reference
    program = dataclasses.replace(program, source=f"{program.source}{answer}\n")
    outcome = sandbox.run(program, unsafe=unsafe)
    return Verdict(outcome.passed, outcome.reason)


def _function(line: Line) -> Question:
    prompt, name = line.text("prompt"), line.text("entry_point")
    tests = f"{line.text('test')}\ncheck({name})\n"
    given = prompt + line.text("canonical_solution", default="    pass\n")
    return Question(line.text("task_id"), prompt, Program(prompt, tests, (name,), given))


def _described(line: Line) -> str:
    tests = "".join(f"# {test}\n" for test in line.texts("test_list"))
    return f"# Task: {line.text('text')}\n# Tests:\n{tests}"


def _task(line: Line) -> Question | None:
    number = line.get("task_id", int)
    if number < 11:
        return None
    tests = "\n".join([line.text("test_setup_code", default=""), *line.texts("test_list")])
    try:
        names = _names(line.text("code", default=""), tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # deeply nested code
        raise ValueError(
            f"line {line.number} of {line.path} holds tests or code that are not Python: "
            f"{printable(error)}"
        ) from None
    return Question(str(number), _described(line), Program("", tests, names))


def _names(code: str, tests: str) -> tuple[str, ...]:
    """The names in the tests that are the program's: the right one defines them, or nothing does.

    A name that the right program does not define stays Python's own, whatever an answer does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of texts that escape what needs no escape
        symbols = symtable.symtable(code, "", "exec").get_symbols()
        tree = ast.parse(tests)
    defined = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return tuple(sorted(n for n in used if n in defined or not hasattr(builtins, n)))


def _worked_task(line: Line) -> str | None:
    if line.get("task_id", int) not in _EXAMPLES:
        return None
    code = line.text("code").replace("\r\n", "\n").strip()
    return f"{_described(line)}{code}\n# End\n\n"


def _examples(data: Path, shots: int) -> str:
    return some_examples(data / _MBPP, shots, _worked_task)


HUMANEVAL = WrittenTask(
    name="humaneval", title="HumanEval: Python functions to complete",
    file="prompts/humaneval.jsonl", read=_function, judge=_judge,
    judge_unsafe=partial(_judge, unsafe=True), metric="pass@1", max_new_tokens=512,
    stops=("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert "),
)  # fmt: skip
MBPP = WrittenTask(
    name="mbpp", title="MBPP: short Python programs", file=_MBPP, read=_task, judge=_judge,
    judge_unsafe=partial(_judge, unsafe=True), metric="pass@1", max_new_tokens=512,
    stops=("\n# End", "\n# Task:"), shots=3, examples=_examples,
)  # fmt: skip
