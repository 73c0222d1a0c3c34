"""A checkpoint's chat template: where it lies, and a conversation in its format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints_tools.chat.renderer import RENDERER
from specjax.checks import printable, shown
from specjax.files.json_objects import read_object

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
MOST_CHARACTERS = 2**20  # of a template; the longest that is published has some 20,000
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # ends the message that the model is to continue


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template in the style of Hugging Face.

    text: the template.
    special_tokens: the tokens that it may write, by the names that it knows, such as "bos_token".
    source: the file that holds it, for messages.
    """

    text: str
    special_tokens: Mapping[str, str]
    source: str

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A conversation as text. Arguments and errors are those of `Tokenizer.chat`."""
        conversation = [_message(message) for message in messages]
        if not conversation:
            raise ValueError("messages must hold at least one message, got none")
        if not answer:
            conversation[-1]["content"] += _MARK
        variables = {
            **self.special_tokens, "messages": conversation, "tools": tools or None,
            "documents": None, "add_generation_prompt": answer,
        }  # fmt: skip
        try:
            kind, text = RENDERER.render(self.text, variables)
        except TypeError as error:  # a field beside those two, which JSON cannot hold
            raise ValueError(f"messages must hold what JSON can hold: {error}") from None
        if kind == "refused":
            raise ValueError(
                f"{self.source}: the chat template refuses the messages: {_said(text)}"
            )
        if kind != "text":
            raise ValueError(f"{self.source}: the chat template cannot be rendered: {_said(text)}")
        rendered = text if answer else self._before_mark(text)
        if tools and rendered == self.render(messages, answer):
            raise ValueError("the chat template takes no tools")
        return rendered

    def save(self, directory: Path) -> None:
        """Writes the files from which `read_chat_template` reads the same template."""
        (directory / TEMPLATE_FILE).write_text(self.text, encoding="utf-8")
        (directory / CONFIG_FILE).write_text(json.dumps(dict(self.special_tokens), indent=1) + "\n")

    def _before_mark(self, text: str) -> str:
        """The text up to the end of the last message."""
        end = text.rfind(_MARK.rstrip())
        if end < 0:
            raise ValueError(f"{self.source}: the chat template leaves out the last message")
        # A mark without its space shows that the template strips messages. The text before the mark
        # would have lost its space too.
        return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


def read_chat_template(path: Path) -> ChatTemplate | None:
    """The chat template in a checkpoint's directory.

    Args:
      path: a directory that may have chat_template.jinja, tokenizer_config.json and
        special_tokens_map.json.

    Returns:
      The template, or None without one. If there are several, it is the one called "default".

    Raises:
      ValueError: a file is damaged, or holds something else.
    """
    own_file, config_file = path / TEMPLATE_FILE, path / CONFIG_FILE
    config = read_object(config_file) if config_file.is_file() else {}
    if own_file.is_file():
        source, text = own_file, _read_text(own_file)
    elif (default := _default(config.get("chat_template"), config_file)) is not None:
        source, text = config_file, default
    else:
        return None
    check_length(text, source)
    named = dict(config)
    old = path / "special_tokens_map.json"  # the only place in which old checkpoints name them
    if old.is_file() and "added_tokens_decoder" not in config:
        named |= read_object(old)
    return ChatTemplate(text, _special_tokens(named), str(source))


def check_length(text: str, source: Path) -> None:
    """Raises ValueError if a template is too long to be one."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"{source}: the chat template has {len(text)} characters; "
            f"accepted: up to {MOST_CHARACTERS}"
        )


def _default(value: Any, file: Path) -> str | None:
    """The text in the field chat_template: one template, or several with names."""
    if isinstance(value, list):
        named = [each for each in value if isinstance(each, dict)]
        value = next((e.get("template") for e in named if e.get("name") == "default"), None)
    elif isinstance(value, dict):
        value = value.get("default")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{file}: chat_template must be a text, got {shown(value)}")
    return value


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the fields that name a token; a field holds a text or a token's description."""
    extra = fields.get("extra_special_tokens")
    named = {name: value for name, value in fields.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_text(file: Path) -> str:
    if file.stat().st_size > 4 * MOST_CHARACTERS:
        raise ValueError(f"{file} has more than the {4 * MOST_CHARACTERS} bytes of a chat template")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message that JSON can hold, without fields that are None: templates would write "None"."""
    fields = {name: value for name, value in message.items() if value is not None}
    for name in ("role", "content"):
        if not isinstance(fields.get(name), str):
            raise ValueError(f"messages need a text in {name!r}, got {shown(fields.get(name))}")
    return fields


def _said(text: str) -> str:
    """The message of a template or of Jinja in one line."""
    return printable(" ".join(text.split())) or "without a reason"
