"""Files of prompts: texts, JSON lines, and dialogues as sets of them are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specjax.checks import shown
from specjax.evaluation.samples import sample
from specjax.files.json_lines import Line, is_json_lines, read_lines, read_text
from specjax.files.json_objects import parse

PROMPT_FIELDS = ("prompt", "question", "text", "problem")  # of a JSON line; the first there is
# The field of a dialogue in MT-Bench, in ShareGPT, in LMSYS-Chat and WildChat, in OpenAI's form.
DIALOGUE_FIELDS = ("turns", "conversations", "conversation", "messages")
_USER = ("user", "human")


def read_prompts(path: Path, limit: int | None = None, seed: int | None = None) -> list[str]:
    """The prompts of a file: texts, one per line, or JSON lines, or a JSON list.

    A JSON object holds its prompt in one of PROMPT_FIELDS, or a dialogue in one of DIALOGUE_FIELDS,
    of which the prompt is the user's first message. Dialogues in which no user speaks are left out.

    Args:
      path: the file.
      limit: the most prompts to take; None: all.
      seed: take a sample of them; None: the first ones.

    Returns:
      The prompts, in the file's order.

    Raises:
      ValueError: the file holds anything else.
    """
    if is_json_lines(path):
        found = [_prompt(line) for line in read_lines(path)]
    elif ".json" in path.suffixes:
        found = [_prompt(line) for line in _read_list(path)]
    else:
        found = [line for line in read_text(path).splitlines() if line.strip()]
    return sample([each for each in found if each is not None], limit, seed)


def _read_list(path: Path) -> list[Line]:
    """The objects of a JSON list, numbered from 1."""
    items = parse(read_text(path), str(path))
    if not isinstance(items, list):
        raise ValueError(f"{path} must hold a JSON list, got {shown(items)}")
    return [
        Line(path, number, item if isinstance(item, dict) else {})
        for number, item in enumerate(items, start=1)
    ]


def _prompt(line: Line) -> str | None:
    """The prompt that an object holds; None for a dialogue without a user's message."""
    plain = any(isinstance(line.fields.get(name), str) for name in PROMPT_FIELDS)
    held = [name for name in DIALOGUE_FIELDS if isinstance(line.fields.get(name), list)]
    if plain or not held:
        return line.text(*PROMPT_FIELDS)
    said = map(_said_by_user, line.fields[held[0]])
    return next((text for text in said if text), None)


def _said_by_user(message: Any) -> str | None:
    """The text of a message; None if somebody else says it."""
    if isinstance(message, str):  # a user's turn, of a dialogue that lists no others
        return message
    if not isinstance(message, dict) or message.get("role", message.get("from")) not in _USER:
        return None
    text = message.get("content", message.get("value"))
    return text if isinstance(text, str) else None
