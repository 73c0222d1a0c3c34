"""PIQA (Bisk et al. 2020) and WinoGrande (Sakaguchi et al. 2020), by the options' likelihood."""

from __future__ import annotations

from specjax.evaluation.tasks.scored import Choice, ChoiceTask
from specjax.files.json_lines import Line


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


def _choice(line: Line, options: tuple[tuple[str, str], ...], name: str) -> Choice:
    gold = line.get(name, int)
    if not 0 <= gold < len(options):
        raise ValueError(
            f"line {line.number} of {line.path} has {name}={gold}, and {len(options)} options"
        )
    return Choice(str(line.number), options, gold)


PIQA = ChoiceTask("piqa", "PIQA: everyday physics, two options", "prompts/piqa.jsonl", _piqa)
WINOGRANDE = ChoiceTask(
    "winogrande", "WinoGrande: pronouns, two options", "prompts/winogrande.jsonl", _winogrande
)
