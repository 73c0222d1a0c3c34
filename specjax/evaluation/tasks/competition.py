r"""MATH (Hendrycks et al. 2021): competition problems, after four worked ones of our own.

An answer is the content of the last \boxed{…} of a solution. Two answers are equal when they are
the same number, or the same text without the marks that change only a formula's appearance.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from specjax.evaluation.tasks.base import identity
from specjax.evaluation.tasks.written import Question, Verdict, WrittenTask
from specjax.files.json_lines import Line

WORKED = (
    (
        "What is the sum of all integers from $1$ to $20$?",
        r"The numbers pair up as $1 + 20 = 2 + 19 = \dots = 21$, and there are $10$ pairs. So the "
        r"sum is $10 \cdot 21 = \boxed{210}$.",
    ),
    (
        r"Solve $\frac{x}{3} + 2 = 4$ for $x$.",
        r"Taking $2$ from both sides gives $\frac{x}{3} = 2$, so $x = 3 \cdot 2 = \boxed{6}$.",
    ),
    (
        "A bag holds $3$ red and $5$ blue marbles. One is drawn at random. What is the probability "
        "that it is red? Express your answer as a common fraction.",
        r"There are $3 + 5 = 8$ marbles, each as likely as the others, and $3$ of them are red: "
        r"$\boxed{\frac{3}{8}}$.",
    ),
    (
        "Expand $(x + 2)(x - 5)$.",
        r"Each term of the first factor times each of the second: $x^2 - 5x + 2x - 10 = "
        r"\boxed{x^2 - 3x - 10}$.",
    ),
)
_LOOKS = re.compile(
    r"\\left|\\right|\\[!,;: ]|\\?[$%]|\^\{?\\circ\}?|\\mbox\{[^{}]*\}|\s"
    r"|(?<=\d),(?=\d{3}(?!\d))"
)
_BARE_FRACTION = re.compile(r"\\frac(\d)(\d)")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")
_NUMBER = re.compile(r"[+-]?(?:\d+/\d+|\d+\.?\d*|\.\d+)")
MOST_CHARACTERS = 1000  # of an answer that is compared as a number


def boxed(solution: str) -> str | None:
    r"""The content of the last \boxed{…}, or of \boxed … before a dollar sign; None where there is
    none, or where it does not end."""
    start = solution.rfind(r"\boxed")
    if start < 0:
        return None
    start += len(r"\boxed")
    if solution[start : start + 1] != "{":
        return solution[start:].partition("$")[0].strip() or None
    start += 1
    depth = 1
    for end in range(start, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if depth == 0:
            return solution[start:end]
    return None


def same_answer(first: str, second: str) -> bool:
    """Whether two answers are equal by a few rules of notation."""
    first, second = _plain(first), _plain(second)
    if first == second:
        return True
    numbers = _number(first), _number(second)
    return None not in numbers and numbers[0] == numbers[1]


def _plain(answer: str) -> str:
    """An answer without units and layout, its fractions in one notation."""
    answer = answer.replace("dfrac", "frac").replace("tfrac", "frac")
    answer = re.sub(
        r"\\text\{\s*([^{}]*)\}$", lambda unit: unit[1] if unit.start() == 0 else "", answer
    )
    answer = _LOOKS.sub("", answer).replace(r"\text", "").rstrip(".")
    answer = re.sub(r"^[a-zA-Z]=", "", answer)
    return _BARE_FRACTION.sub(r"\\frac{\1}{\2}", answer)


def _number(plain: str) -> Fraction | None:
    """The value of a fraction or of a decimal; None also for one with an exponent, whose value may
    fill the memory."""
    if len(plain) > MOST_CHARACTERS:
        return None
    found = _FRACTION.fullmatch(plain)
    try:
        if found:
            value = Fraction(int(found[2]), int(found[3]))
            return -value if found[1] else value
        return Fraction(plain) if _NUMBER.fullmatch(plain) else None
    except ZeroDivisionError:
        return None


def _question(line: Line) -> Question:
    """The whole set's files name no answer, but their solutions end with one."""
    answer = line.text("answer", default="") or boxed(line.text("solution", default=""))
    if not answer:
        raise ValueError(f"line {line.number} of {line.path} has no answer, nor one in solution")
    return Question(
        identity(line, "unique_id"), _layout(line.text("problem")), answer,
        kind=line.text("subject", "type", default="") or None,
    )  # fmt: skip


def _layout(problem: str) -> str:
    return f"Problem: {problem}\nSolution:"


def _examples(data: Path, shots: int) -> str:
    if shots > len(WORKED):
        raise ValueError(f"math has {len(WORKED)} worked examples, shots={shots}")
    return "".join(f"{_layout(problem)} {solution}\n\n" for problem, solution in WORKED[:shots])


def _judge(question: Question, answer: str) -> Verdict:
    found = boxed(answer)
    return Verdict(found is not None and same_answer(found, question.reference), str(found))


MATH = WrittenTask(
    name="math", title="MATH: problems of mathematics competitions", file="prompts/math500.jsonl",
    read=_question, judge=_judge, metric="exact match",
    max_new_tokens=512, stops=("\nProblem:",), shots=4, examples=_examples,
)  # fmt: skip
