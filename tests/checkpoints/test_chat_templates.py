"""Chat templates are programs that somebody else wrote: what they may do, and what they give."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

import specjax
from checkpoints_tools.chat import renderer
from checkpoints_tools.chat.template import ChatTemplate, read_chat_template

TINY = Path(specjax.__file__).parent / "models" / "tiny"
QUESTION = [{"role": "user", "content": "Why <so> \"late\" & 'dark'?\n"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Tell {a} tale.  "},
    {"role": "assistant", "content": "Once upon"},
    {"role": "user", "content": "And then?"},
]
UNFINISHED = [*TALK, {"role": "assistant", "content": "The king said  "}]
TALKS = (QUESTION, TALK, TALK[1:], TALK[2:], UNFINISHED)
TEMPLATES = {
    "roles between marks": (
        "{% for message in messages %}\n"
        "    {%- if loop.first and message.role != 'system' %}<|system|>None given.{% endif %}\n"
        "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "turns that must alternate": (
        "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim %}"
        "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
        "{% for message in turns %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' }}"
        "{% if loop.last and first is defined %}{{ first + '\\n\\n' }}{% endif %}"
        "{{ message['content'] | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' ~ message['content'] | trim ~ eos_token }}{% endif %}{% endfor %}"
    ),
    "a namespace, a macro and loop controls": (
        "{%- set found = namespace(last=-1, notes=dict(a=1)) -%}"
        "{%- macro line(message) -%}{{ message.role }}: {{ message.content }};{%- endmacro -%}"
        "{%- for message in messages -%}{%- if message.role == 'system' -%}{%- continue -%}"
        "{%- endif -%}{%- set found.last = loop.index0 -%}{{ line(message) }}"
        "{%- if loop.index > 9 -%}{%- break -%}{%- endif -%}{%- endfor -%}{{ found.last }}"
    ),
    "JSON and marks of the model's own words": (
        "{{ messages | tojson }}{{ messages[-1] | tojson(indent=2, sort_keys=true) }}"
        "{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}"
        "{% generation %}{% set inner = 1 %}{{ messages[-1].content }}{% endgeneration %}"
        "{{ inner is defined }}{{ strftime_now('%Y') | length }}"
    ),
    "a template that shortens": "{{ messages[0].content }}{{ unknown_token }}",
}
CHANGES: list[dict[str, Any]] = [
    {"bos_token": "<s>"},
    {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False}, "eos_token": None},
    {"chat_template": [{"name": "default", "template": "{{ eos_token }}"},
                       {"name": "tool_use", "template": "no"}]},
    {"chat_template": {"default": "{{ eos_token }}{{ messages[0].content }}", "tool_use": "no"}},
]  # fmt: skip


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with less time for a template than users' templates have."""
    renderer.RENDERER.close()
    monkeypatch.setattr(renderer, "SECONDS", 0.3)
    yield
    renderer.RENDERER.close()


def folder_with(path: Path, template: str | None = None, **changes: Any) -> Path:
    """A directory with the shipped tokenizer and a template in a file of its own."""
    path.mkdir(exist_ok=True)
    shutil.copy(TINY / "tokenizer.json", path)
    fields = json.loads((TINY / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(fields | changes))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


# The text is that of transformers, which also refuses what is refused here.
def test_texts_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    compared = 0
    folders = [
        folder_with(tmp_path / str(number), template, **change)
        for number, (template, change) in enumerate(
            [(text, CHANGES[0]) for text in TEMPLATES.values()]
            + [(None if "chat_template" in c else TEMPLATES["roles between marks"], c)
               for c in CHANGES]
        )
    ]  # fmt: skip
    for folder in folders:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ours = specjax.load_tokenizer(folder)
        assert ours.chat_template == theirs.get_chat_template()
        for messages, answer in itertools.product(TALKS, (True, False)):
            expected = found = None
            with contextlib.suppress(ValueError, jinja2.TemplateError):
                expected = theirs.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=answer,
                    continue_final_message=not answer,
                )  # fmt: skip
            with contextlib.suppress(ValueError):
                found = ours.chat(messages, answer)
            assert found == expected
            compared += found is not None
    assert compared > 60


@pytest.mark.parametrize("answer", [True, False])
def test_tools_that_a_template_leaves_out_are_refused(answer: bool) -> None:
    talk, tools = [{"role": "user", "content": "a"}], [{"name": "search"}]
    with_tools = ChatTemplate("{{ tools }}{{ messages[-1].content }}", {}, "file")
    assert "search" in with_tools.render(talk, answer, tools)
    without = ChatTemplate("{{ messages[-1].content }}", {}, "file")
    with pytest.raises(ValueError, match="the chat template takes no tools"):
        without.render(talk, answer, tools)


HOSTILE = {
    "{{ 'a' * 10**10 }}": "needs too much memory",
    "{{ 'a' * 10**8 }}": "needs too much memory",
    "{{ ('a,' * 10**6).split(',') | join('b' * 1000) }}": "needs too much memory",
    "{{ 'a' | center(10**9) }}": "needs too much memory",
    "{{ '%1000000000d' | format(1) }}": "needs too much memory",
    "{{ 'a\\nb' | indent(10**9) }}": "needs too much memory",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "more than 16777216 characters",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "nested too deeply",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{% include '/etc/passwd' %}": "TemplateNotFound: /etc/passwd",
    "{{ nothing.at.all }}": "UndefinedError: 'nothing' is undefined",
    "{% if %}": "TemplateSyntaxError: Expected an expression",
    "{{ ''.__class__.__mro__ }}": "SecurityError: ",
    "{{ messages.append(1) }}": "SecurityError: ",
    "{{ namespace(__init__=1) }}": "SecurityError: ",
    "{{ raise_exception('\x1b[31mred\nlines') }}": r"refuses the messages: \x1b[31mred lines",
    "{{ raise_exception('') }}": "refuses the messages: without a reason",
    "{{ raise_exception('a' * 10**6) }}": "refuses the messages: aaa",
}


ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ lipsum(n=99999) }}",
)


def refused(template: str, reason: str) -> None:
    """Checks for one short sentence that names the file, and that the next template is rendered."""
    with pytest.raises(ValueError) as refusal:
        ChatTemplate(template, {}, "bad.jinja").render(QUESTION)
    message = str(refusal.value)
    assert message.startswith("bad.jinja: the chat template ") and reason in message
    assert message.isprintable() and len(message) < 400
    good = ChatTemplate("{{ messages[0].content }}", {}, "good.jinja")
    assert good.render(QUESTION) == QUESTION[0]["content"]


def test_hostile_templates_end_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 30.0)  # a busy machine takes long to fill memory
    for template, reason in HOSTILE.items():
        refused(template, reason)


@pytest.mark.parametrize("template", ENDLESS)
def test_endless_templates_end_in_one_sentence(template: str) -> None:
    refused(template, "it takes more than 0.3 seconds")


# The process is killed from outside, or an answer is interrupted: the next call gets a new one.
def test_a_process_that_dies_is_replaced() -> None:
    good = ChatTemplate("{{ messages[0].content }}", {}, "good.jinja")
    for _ in range(2):
        assert good.render(QUESTION) == QUESTION[0]["content"]
        process = renderer.RENDERER._process
        assert process is not None
        process.kill()
        with pytest.raises(ValueError, match=r"good\.jinja: .* its process .* \(status -9\)"):
            good.render(QUESTION)


# Neither a checkpoint's code nor transformers is used, and nobody is asked.
def test_no_code_of_the_checkpoint_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    folder = folder_with(tmp_path, "{{ messages[0].content }}", **own)
    (folder / "own.py").write_text("raise SystemExit")
    assert specjax.load_tokenizer(folder).chat(QUESTION) == QUESTION[0]["content"]


def test_sentencepiece_tokenizers_run_no_code_either(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    shutil.copy(data / "tokenizers/storyllamas4096/tokenizer_4096.model", tmp_path)
    (tmp_path / "tokenizer_4096.model").rename(tmp_path / "tokenizer.model")
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text("raise SystemExit")

    def ask(*_: object) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr(builtins, "input", ask)
    with pytest.raises(ValueError, match=r"tokenizer\.model cannot be read: "):
        specjax.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": b'{"chat_template": 5}'}, "must be a text, got 5"),
        ({"tokenizer_config.json": b"{"}, "is not valid JSON"),
        ({"tokenizer_config.json": b"[" * 10**5}, "is nested too deeply"),
        ({"chat_template.jinja": b"\xff"}, "is not UTF-8 text"),
        ({"chat_template.jinja": b" " * (2**20 + 1)}, "accepted: up to 1048576"),
        ({"chat_template.jinja": b" " * (2**22 + 1)}, "has more than the 4194304 bytes"),
        ({"chat_template.jinja": b"", "special_tokens_map.json": b"[]"}, "must hold a JSON object"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=message) as refusal:
        read_chat_template(tmp_path)
    assert str(refusal.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": "a", "more": object()}],
    ],
)
def test_messages_of_other_kinds_are_refused(messages: list[Any]) -> None:
    with pytest.raises(ValueError, match="messages "):
        ChatTemplate("{{ messages }}", {}, "good.jinja").render(messages)
