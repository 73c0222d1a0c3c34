"""The judges against answers whose worth is plain, and the files they read from."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from specjax.evaluation import sandbox
from specjax.evaluation.samples import sample
from specjax.evaluation.tasks import TASKS, WIKITEXT2
from specjax.evaluation.tasks.arithmetic import GSM8K, final_number
from specjax.evaluation.tasks.choices import GPQA, PIQA, WINOGRANDE
from specjax.evaluation.tasks.competition import MATH, WORKED, boxed, same_answer
from specjax.evaluation.tasks.programs import HUMANEVAL, MBPP
from specjax.evaluation.tasks.summaries import CNN_DAILYMAIL, XSUM
from specjax.evaluation.tasks.unjudged import CLASS_EVAL, HAGRID
from specjax.evaluation.tasks.written import Question
from specjax.files.json_lines import read_lines
from tests.support.task_files import write_tasks


@pytest.fixture
def walls() -> None:
    """For tests that run programs: they are skipped where nothing holds them."""
    try:
        sandbox.check()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", "7"),
        ("#### 1,250", "1250"),
        ("so it costs $18.00", "18"),
        ("#### -3.50 degrees", "-3.5"),
        ("#### $5\nThat is 12 times as much.", "5"),
        ("From 4 to 12.", "12"),
        ("#### unknown, perhaps 9", "9"),
    ],
)
def test_final_number(answer, number) -> None:
    assert final_number(answer) == Decimal(number)


def test_arithmetic_is_judged_by_the_number_alone() -> None:
    question = Question("1", "", "48/2 = 24\n#### 72")
    for answer, right in (
        ("#### 72", True), ("It is 72.0", True), ("#### 7", False), ("72 of 73", False),
        ("", False), ("#### 72\n\nQuestion: How many?\nAnswer: #### 9", True),
    ):  # fmt: skip
        assert GSM8K.judge(question, GSM8K.cut(answer)).correct is right


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (r"\frac{1}{2}", r"\dfrac{1}{2}"),
        (r"\frac12", "0.5"),
        ("1/2", r"\tfrac{1}{2}"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("1,000", "1000"),
        (r"\$12", "12"),
        (r"15\%", "15"),
        (r"90^\circ", "90"),
        ("x = 5", "5"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"12\text{ cm}", "12"),
        ("5.", "5"),
        ("2.0", "2"),
        ("+.5", "1/2"),
    ],
)
def test_same_answers(first, second) -> None:
    assert same_answer(first, second) and same_answer(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [("1", "2"), ("p - q", "q - p"), (r"\frac{1}{2}", r"\frac{2}{1}"), ("(1,2)", "(2,1)"),
     (r"\frac{1}{0}", "1"), ("", "0"), ("-3", "3"), ("1/0", "1"), ("1e1000000000", "1"),
     ("1" * 5000, "1"), (r"\frac{1}{%s}" % ("1" * 5000), "1")],
)  # fmt: skip
def test_different_answers(first, second) -> None:
    assert not same_answer(first, second)


def test_boxed() -> None:
    assert boxed(r"first \boxed{1}, then \boxed{\frac{a}{b}}.") == r"\frac{a}{b}"
    assert boxed(r"\boxed{never closed {") is None
    assert boxed("no box") is None and boxed(r"\boxed") is None
    assert boxed(r"so $x = \boxed 2$, and no more.") == "2"
    question = Question("1", "", "6")
    assert MATH.judge(question, r"so $x = \boxed{6}$").correct
    assert not MATH.judge(question, "so x = 6").correct  # an answer is boxed or it is none
    for _, solution in WORKED:
        assert boxed(solution) is not None


def test_programs_are_judged_by_running_them(tmp_path, walls) -> None:
    write_tasks(tmp_path)
    (item,) = HUMANEVAL.items(tmp_path)
    assert HUMANEVAL.judge(item, "    return 2 * x\n").correct
    wrong = HUMANEVAL.judge(item, "    return x\n")
    assert not wrong.correct and wrong.note.startswith("AssertionError")
    # The text behind the function is another text.
    continued = HUMANEVAL.cut("    return 2 * x\n\ndef other():\n    broken(")
    assert HUMANEVAL.judge(item, continued).correct

    item = MBPP.items(tmp_path)[0]
    assert MBPP.judge(item, "def add(a, b):\n    return a + b").correct
    assert not MBPP.judge(item, "def plus(a, b):\n    return a + b").correct


def test_conversations_are_not_judged(tmp_path) -> None:
    write_tasks(tmp_path)
    (item,) = TASKS["mt_bench"].items(tmp_path)
    assert (item.id, item.prompt, item.later) == ("7", "Tell a tale.", ("Tell it again.",))
    turns = [item.prompt, " In {} winter.", *item.later]
    assert TASKS["mt_bench"].plain(turns[:1]) == "Question: Tell a tale.\nAnswer:"
    assert TASKS["mt_bench"].plain(turns) == (
        "Question: Tell a tale.\nAnswer: In {} winter.\n\nQuestion: Tell it again.\nAnswer:"
    )
    assert TASKS["mt_bench"].judge(item, "Once upon a time").correct is None


# Examples come before every question, as many as asked for, and are never questions themselves.
def test_examples(tmp_path) -> None:
    write_tasks(tmp_path)
    for shots in (0, 1, 2):
        for item in GSM8K.items(tmp_path, shots):
            assert item.prompt.count("Question:") == shots + 1
            assert item.prompt.count("####") == shots and item.prompt.endswith("\nAnswer:")
            assert "<<" not in item.prompt
    assert len(MATH.items(tmp_path)[0].prompt.split("Problem:")) == 4 + 2
    tasks = MBPP.items(tmp_path)
    assert [item.id for item in tasks] == ["11", "12"]
    assert tasks[0].prompt.count("# Task:") == 3 + 1 and tasks[0].prompt.count("# End") == 3
    with pytest.raises(ValueError, match=r"gsm8k_train.jsonl holds 8 examples, shots=9"):
        GSM8K.items(tmp_path, 9)
    with pytest.raises(ValueError, match="math has 4 worked examples, shots=5"):
        MATH.items(tmp_path, 5)
    with pytest.raises(ValueError, match="shots must be at least 0, got -1"):
        GSM8K.items(tmp_path, -1)


def test_examples_of_choices_come_before_every_context(tmp_path) -> None:
    write_tasks(tmp_path)
    assert PIQA.items(tmp_path)[0].options[0][0] == "Question: count apples\nAnswer:"
    for item in PIQA.items(tmp_path, 2):
        for context, _ in item.options:
            assert context.startswith(
                "Question: find apples\nAnswer: look\n\nQuestion: find pears\nAnswer: look\n\n"
                "Question: count "
            )
    for item in WINOGRANDE.items(tmp_path, 1):
        for context, end in item.options:
            assert context.startswith("The bag holds more than the box, so the box was full first.")
            assert end == " was open."
    with pytest.raises(ValueError, match=r"winogrande_train.jsonl holds 1 examples, shots=2"):
        WINOGRANDE.items(tmp_path, 2)


def test_options_for_experts(tmp_path) -> None:
    write_tasks(tmp_path)
    (item,) = GPQA.items(tmp_path)
    assert item.id == "rec1" and item.options[item.gold][1] == " 7"
    assert [end for _, end in item.options] == [" 8", " 7", " 9", " 10"]
    assert {context for context, _ in item.options} == {"Question: Which is a prime?\nAnswer:"}


@pytest.mark.parametrize(
    ("task", "reference"),
    [(CNN_DAILYMAIL, "A king fell."), (XSUM, "A king fell from a horse.")],
)
def test_summaries_are_scored(task, reference, tmp_path) -> None:
    write_tasks(tmp_path)
    (item,) = task.items(tmp_path)
    assert item.prompt.startswith("Article: The king") and item.prompt.endswith("\nSummary:")
    assert item.reference == reference
    assert dict(task.judge(item, item.reference).scores) == dict.fromkeys(task.scores, 1.0)
    assert dict(task.judge(item, "").scores) == dict.fromkeys(task.scores, 0.0)
    partly = task.judge(Question("1", "", "the cat sat"), "the cats ran away").scores
    # Of 4 and 3 words 2 are the same by their stems, and of 3 and 2 pairs 1 is.
    assert partly == pytest.approx({"rouge1": 4 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7})


def test_what_is_read_beside_a_question(tmp_path) -> None:
    write_tasks(tmp_path)
    (item,) = HAGRID.items(tmp_path)
    assert item.prompt == (
        "[1] The king fell.\n[2] His horse did not.\nQuestion: Who fell?\nAnswer:"
    )
    (item,) = CLASS_EVAL.items(tmp_path)
    assert item.id == "C_0" and "def swap(self):" in item.prompt


# The files of the whole set have a level and a type, and no answer beside the solution.
def test_lines_of_the_whole_set(tmp_path) -> None:
    write_tasks(tmp_path)
    line = {"problem": "What is $1 + 1$?", "level": "Level 1", "type": "Algebra",
            "solution": r"It is $\boxed{2}$."}  # fmt: skip
    (tmp_path / MATH.file).write_text(json.dumps(line))
    (item,) = MATH.items(tmp_path)
    assert (item.reference, item.kind) == ("2", "Algebra")
    (tmp_path / MATH.file).write_text(json.dumps({**line, "solution": "It is 2."}))
    with pytest.raises(ValueError, match=r"line 1 of .* has no answer, nor one in solution"):
        MATH.items(tmp_path)
    (tmp_path / MATH.file).write_text(json.dumps({**line, "answer": "3", "solution": None}))
    assert MATH.items(tmp_path)[0].reference == "3"


def test_a_blank_line_ends_no_answer_in_a_chat() -> None:
    answer = "Here it is:\n\nA king fell.\nArticle: another"
    assert XSUM.cut(answer) == "Here it is:"
    assert XSUM.cut(answer, chat=True) == "Here it is:\n\nA king fell."


def test_a_balanced_sample_has_all_kinds_alike(data) -> None:
    items = MATH.items(data, 0)
    for seed in (None, 42):
        found = sample(items, 70, seed, lambda item: item.kind)
        assert set(Counter(item.kind for item in found).values()) == {10}
        assert found == sorted(found, key=items.index) and len(set(found)) == 70
    assert sample(items, 70, 42, lambda item: item.kind) == found
    assert sample(items, 70, 43, lambda item: item.kind) != found
    # A kind of which there are too few leaves its room to the others.
    assert sample("aaaaabbc", 6, None, str) == list("aaabbc")
    assert sample("abab", 9, 1, str) == list("abab")


# Every task set that is there reads as it should.
def test_real_data(data) -> None:
    counts = {
        name: len(task.items(data))
        for name, task in TASKS.items()
        if task is not WIKITEXT2 and (data / task.file).exists()
    }
    assert counts == {
        "gsm8k": 660, "math": 500, "humaneval": 82, "mbpp": 500, "piqa": 500, "winogrande": 500,
        "mt_bench": 80, "vicuna_bench": 80,
    }  # fmt: skip


def test_reference_solutions_are_right(data) -> None:
    for task, name in ((GSM8K, "answer"), (MATH, "solution")):
        lines = read_lines(data / task.file)[:100]
        for line, item in zip(lines, task.items(data), strict=False):
            assert task.judge(item, line.text(name)).correct, line


# In make test one program of each kind: a helper of the prompt's in the tests, a class of the
# program's in what comes before the tests.
@pytest.mark.parametrize(
    ("task", "field", "chosen"),
    [
        (HUMANEVAL, "canonical_solution", "HumanEval/32"),
        (MBPP, "code", "367"),
        pytest.param(HUMANEVAL, "canonical_solution", None, marks=pytest.mark.exhaustive),
        pytest.param(MBPP, "code", None, marks=pytest.mark.exhaustive),
    ],
)
def test_reference_programs_are_right(task, field, chosen, data, walls) -> None:
    lines = read_lines(data / task.file)
    solutions = {str(line.fields["task_id"]): line.text(field) for line in lines}
    for item in task.items(data):
        if chosen in (None, item.id):
            assert task.judge(item, solutions[item.id]).correct, item


# Tests call the prompt's helpers and Python's functions as they were, whatever an answer makes of
# them.
def test_answers_do_not_judge_themselves(tmp_path, walls) -> None:
    write_tasks(tmp_path)
    line = json.loads((tmp_path / HUMANEVAL.file).read_text())
    line["prompt"] = "def error(x):\n    return x - 6\n\n\n" + line["prompt"]
    line["test"] = "def check(candidate):\n    assert abs(error(candidate(3))) < 1\n"
    (tmp_path / HUMANEVAL.file).write_text(json.dumps(line))
    (item,) = HUMANEVAL.items(tmp_path)
    assert HUMANEVAL.judge(item, "    return 2 * x").correct
    cheat = "    return 0\n\n\ndef error(x):\n    return 0\n\n\ndef abs(x):\n    return 0\n"
    assert not HUMANEVAL.judge(item, cheat).correct


def test_a_program_may_have_the_name_of_a_function_of_pythons(tmp_path, walls) -> None:
    write_tasks(tmp_path)
    line = {"task_id": 11, "text": "Add.", "test_list": ["assert abs(sum(2, 3) - 5) == 0"]}
    (tmp_path / MBPP.file).write_text(json.dumps({**line, "code": "def sum(a, b): return a + b"}))
    (item,) = MBPP.items(tmp_path, 0)
    assert MBPP.judge(item, "def sum(a, b):\n    return a + b").correct
    assert not MBPP.judge(item, "def sum(a, b):\n    return 0\ndef abs(x):\n    return 0").correct


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("gsm8k", "{", r"line 3 of .*gsm8k_test.jsonl is not valid JSON"),
        ("gsm8k", "[]", r"line 3 of .*gsm8k_test.jsonl has no text in answer"),
        ("gsm8k", '{"question": "?", "answer": "none"}', "line 3 .* has no number in answer"),
        ("mbpp", '{"task_id": 12, "text": "", "test_list": []}', "the id '12' of line 5"),
        ("mbpp", '{"task_id": 13, "text": "", "test_list": ["assert ("]}', "line 6 .* not Python"),
        ("piqa", '{"goal": "", "sol1": "", "sol2": "", "label": 2}', "label=2, and 2 options"),
        ("winogrande", '{"context_options": "", "continuation": ""}', "no list in context_options"),
        ("mt_bench", '{"turns": []}', "must have texts in turns"),
        ("mt_bench", '{"turns": [5]}', r"line 2 .* must have texts in turns, got \[5\]"),
        ("mt_bench", '{"turns": ["a"], "question_id": []}', "line 2 .* has no text in question_id"),
        ("math", '{"problem": "?", "answer": "1", "unique_id": {}}', "no text in unique_id"),
        ("hagrid", '{"query": "?", "quotes": [1]}', "line 2 .* must have quotes with a text each"),
        ("gpqa", '{"Question": "?", "Correct Answer": "1"}', "no text in Incorrect Answer 1"),
        ("xsum", '{"document": "?"}', "line 2 of .*xsum.jsonl has no text in summary"),
        ("mbpp", '{"task_id": 13, "text": "", "test_list": [1]}', "must have texts in test_list"),
        ("mbpp", '{"task_id": 13, "text": "", "code": 1, "test_list": []}', "no text in code"),
    ],
)
def test_what_is_wrong_with_a_file(task, line, message, tmp_path) -> None:
    write_tasks(tmp_path)
    path = tmp_path / TASKS[task].file
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        TASKS[task].items(tmp_path)


def test_an_empty_set_is_refused(tmp_path) -> None:
    write_tasks(tmp_path)
    (tmp_path / GSM8K.file).write_text("\n\n")
    with pytest.raises(ValueError, match=r"gsm8k_test.jsonl holds no items"):
        GSM8K.items(tmp_path)


# A line separator of Unicode within a string does not end a JSON line, and blank lines count.
def test_lines_are_numbered_as_an_editor_does(tmp_path) -> None:
    path = Path(tmp_path / "lines.jsonl")
    path.write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + '\n\n{"text": 1}\n')
    first, second = read_lines(path)
    assert first.text("text") == "a\u2028b" and second.number == 3
    with pytest.raises(ValueError, match=r"line 3 of .* has no text in any of text, prompt"):
        second.text("text", "prompt")
