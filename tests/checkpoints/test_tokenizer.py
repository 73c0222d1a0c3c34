"""A checkpoint's tokenizer: its chat template, its special tokens, and when two are the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import specjax
from specjax.evaluation.digests import digest

TINY = Path(specjax.__file__).parent / "models" / "tiny"
TEMPLATE = (
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('users begin') }}{% endif %}"
    "{{ eos_token }}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "Tell {a} tale."},
    {"role": "assistant", "content": "Once"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer without a template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("within", ["a file of its own", "the configuration"])
def test_conversations(folder: Path, within: str) -> None:
    if within == "a file of its own":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    tokenizer = specjax.load_tokenizer(folder)
    first = "<|endoftext|>"
    assert tokenizer.chat(MESSAGES[:1]) == first + "<user>Tell {a} tale.<assistant>"
    unfinished = first + "<user>Tell {a} tale.<assistant>Once"
    assert tokenizer.chat(MESSAGES, answer=False) == unfinished
    assert tokenizer.chat_template == TEMPLATE
    ids = tokenizer.encode(unfinished, special_tokens=False)
    assert ids[0] == tokenizer.special_tokens()[first] and ids.count(ids[0]) == 1
    with pytest.raises(ValueError, match="the chat template refuses the messages: users begin"):
        tokenizer.chat(MESSAGES[1:])


def test_no_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    for tokenizer in (specjax.load_tokenizer("tiny"), specjax.load_tokenizer(folder)):
        with pytest.raises(ValueError, match="has no chat template"):
            tokenizer.chat(MESSAGES[:1])


# Equal tokenizers share compiled programs and results.
def test_equal_contents_are_equal_tokenizers(folder: Path) -> None:
    tiny, copy = specjax.load_tokenizer("tiny"), specjax.load_tokenizer(folder)
    assert tiny == copy and hash(tiny) == hash(copy) and repr(tiny) == repr(copy)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"content": "<|endoftext|>"', '"content": "<|end|>"'))
    other = specjax.load_tokenizer(folder)
    assert tiny != other and tiny != "tiny"
    model = specjax.load("tiny-draft")
    drafters = [specjax.TranslatedDraft(model, draft, tiny) for draft in (tiny, copy, other)]
    digests = [digest(drafter) for drafter in drafters]
    assert digests[0] == digests[1] != digests[2]
