"""PIQA (Bisk et al. 2020), WinoGrande (Sakaguchi et al. 2020) and GPQA (Rein et al. 2023), by the
options' likelihood."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from specjax.evaluation.tasks.base import identity, some_examples
from specjax.evaluation.tasks.scored import Choice, ChoiceTask
from specjax.files.json_lines import Line

_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _piqa(line: Line) -> Choice:
    context = f"Question: {line.text('goal')}\nAnswer:"
    options = tuple((context, " " + line.text(name)) for name in ("sol1", "sol2"))
    return _choice(line, options, "label")


def _winogrande(line: Line) -> Choice:
    """The options' contexts differ; the continuation is the same (partial scoring, Trinh and Le
    2018)."""
    end = " " + line.text("continuation")
    options = tuple((context, end) for context in line.texts("context_options"))
    return _choice(line, options, "gold")


def _gpqa(line: Line) -> Choice:
    """The right option takes each place in turn, so that a model that always chooses one place
    gains nothing."""
    context = f"Question: {line.text('Question').strip()}\nAnswer:"
    options = [(context, " " + line.text(name).strip()) for name in _WRONG]
    gold = line.number % (len(_WRONG) + 1)
    options.insert(gold, (context, " " + line.text("Correct Answer").strip()))
    return Choice(identity(line, "Record ID"), tuple(options), gold)


def _choice(line: Line, options: tuple[tuple[str, str], ...], name: str) -> Choice:
    gold = line.get(name, int)
    if not 0 <= gold < len(options):
        raise ValueError(
            f"line {line.number} of {line.path} has {name}={gold}, and {len(options)} options"
        )
    return Choice(str(line.number), options, gold)


def _examples(name: str, read: Callable[[Line], Choice], data: Path, shots: int) -> str:
    """The training part's first choices, each with its right option."""

    def worked(line: Line) -> str:
        choice = read(line)
        return "".join(choice.options[choice.gold]) + "\n\n"

    return some_examples(data / "prompts" / f"{name}_train.jsonl", shots, worked)


def _with_examples(name: str, title: str, read: Callable[[Line], Choice]) -> ChoiceTask:
    examples = partial(_examples, name, read)
    return ChoiceTask(name, title, f"prompts/{name}.jsonl", read, examples)


PIQA = _with_examples("piqa", "PIQA: everyday physics, two options", _piqa)
WINOGRANDE = _with_examples("winogrande", "WinoGrande: pronouns, two options", _winogrande)
GPQA = ChoiceTask("gpqa", "GPQA: questions for experts, four options", "prompts/gpqa.jsonl", _gpqa)
