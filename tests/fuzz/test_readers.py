"""Every reader of files that others wrote, on damaged and hostile ones.

A reader raises ValueError or OSError with one printable sentence, or reads; it never hangs.
`make test` runs a few cases of each, `make test-all` as many as fit into a minute. For more of
them: SPECJAX_FUZZ_CASES=10000 python -m pytest tests/fuzz -m exhaustive
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from safetensors.numpy import save
from tokenizers import models, pre_tokenizers

from checkpoints_tools import checkpoint
from checkpoints_tools.chat import renderer
from checkpoints_tools.chat.template import ChatTemplate, read_chat_template
from checkpoints_tools.huggingface import open_checkpoint
from checkpoints_tools.huggingface_config import read_config, read_quantization
from checkpoints_tools.tokenizer import Tokenizer, read_tokenizer
from specjax.commands.files import read_prompts
from specjax.drafting.datastore import Datastore
from specjax.evaluation.runs import Results
from specjax.evaluation.tasks import TASKS
from specjax.evaluation.tasks.base import Setup
from tests.support import packers, small_tokenizers
from tests.support.fuzzing import fuzz, fuzz_a_little
from tests.support.hf_directories import FIELDS, random_tensors, write_config, write_model
from tests.support.mutations import ESCAPE, changed_bytes, changed_json
from tests.support.random_models import quantized_model
from tests.support.task_files import write_tasks

SECONDS = 60  # for the long run of all readers
Reader = tuple[Callable[[Any], object], st.SearchStrategy[Any]]
READERS: dict[str, Callable[[Path], Reader]] = {}


def reader(prepare: Callable[[Path], Reader]) -> Callable[[Path], Reader]:
    """Adds a reader: a function of a folder that gives what reads a case, and the cases."""
    READERS[prepare.__name__] = prepare
    return prepare


def reads(file: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Reads after a case has become the contents of a file."""

    def write_and_read(data: bytes) -> object:
        file.write_bytes(data)
        return read()

    return write_and_read


YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32,
    "beta_slow": 1, "attention_factor": 1.2, "mscale": 1, "mscale_all_dim": 1, "truncate": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
    "sliding_window": 32, "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
PACKED = packers.PACKED | {"ignore": ["lm_head", "re:.*down_proj"]}


@reader
def config(folder: Path) -> Reader:
    def read() -> None:
        read_config(folder)
        layout_of = read_quantization(folder)
        for name in ("model.layers.0.mlp.down_proj", "lm_head"):
            layout = layout_of(name) if layout_of else None
            if layout:
                layout.parts(64, 64)

    valid = [
        FIELDS | changes
        for changes in (
            {"rope_scaling": YARN},
            {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}, "head_dim": 16},
            QWEN | {"pad_token_id": -1, "eos_token_id": [2, 3]},
            {"quantization_config": PACKED},
            {"quantization_config": packers.GPTQ},
            {"quantization_config": packers.AWQ},
        )
    ]
    return reads(folder / "config.json", read), st.one_of(*map(changed_json, valid))


@reader
def generation_config(folder: Path) -> Reader:
    write_config(folder)
    valid = {"eos_token_id": [2, 3], "pad_token_id": 0, "bos_token_id": 1}
    file = folder / "generation_config.json"
    return reads(file, lambda: read_config(folder)), changed_json(valid)


@reader
def index(folder: Path) -> Reader:
    file = write_model(folder) / "model.safetensors.index.json"
    valid = json.loads(file.read_text())
    return reads(file, lambda: open_checkpoint(folder)), changed_json(valid)


@reader
def config_and_tensors(folder: Path) -> Reader:
    """config.json of a directory whose tensors are there."""
    file = write_model(folder, shards=1) / "config.json"
    return reads(file, lambda: open_checkpoint(folder)), changed_json(json.loads(file.read_text()))


@reader
def safetensors(folder: Path) -> Reader:
    write_config(folder, vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    data = save(random_tensors(folder))
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])

    def read() -> None:
        for _ in open_checkpoint(folder).weights():
            pass

    with_header = st.tuples(changed_json(header), st.sampled_from((0, 0, 0, 1, -1, 2**40))).map(
        lambda case: struct.pack("<Q", max(len(case[0]) + case[1], 0)) + case[0] + data[8 + size :]
    )
    return reads(folder / "model.safetensors", read), st.one_of(with_header, changed_bytes(data))


def _small_tokenizers() -> Iterator[Tokenizer | tokenizers.Tokenizer]:
    yield small_tokenizers.letters("a b c ab abc", (("a", "b"), ("ab", "c")))
    yield small_tokenizers._sentencepiece(300)
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("ab", -1.5)], 0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    yield unigram
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[U]": 1}, unk_token="[U]"))
    words.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\s+|\p{L}+"), "isolated")
    words.add_special_tokens(["[U]"])
    yield words
    yield tokenizers.Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))


@reader
def tokenizer(folder: Path) -> Reader:
    def read() -> None:
        found = read_tokenizer(folder)
        for text in ("", "abc ab é\n<s> 大"):
            for special_tokens in (True, False):
                found.decode(found.encode(text, special_tokens))
        found.special_tokens()
        found.vocabulary()

    backends = [getattr(each, "_backend", each) for each in _small_tokenizers()]
    cases = [changed_json(json.loads(backend.to_str())) for backend in backends]
    return reads(folder / "tokenizer.json", read), st.one_of(*cases)


@reader
def tokenizer_config(folder: Path) -> Reader:
    def read() -> None:
        found = read_chat_template(folder)
        if found is not None:
            found.render([{"role": "user", "content": "a"}])

    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    valid = tokens | {
        "chat_template": [{"name": "default", "template": template}],
        "extra_special_tokens": {"image_token": "<image>"},
    }
    cases = (changed_json(valid), changed_json(tokens | {"chat_template": template}))
    return reads(folder / "tokenizer_config.json", read), st.one_of(*cases)


WORDS = (
    "{{", "}}", "{%", "%}", "{%-", "-%}", "{#", "#}", "for m in messages", "endfor", "if", "else",
    "endif", "set x =", "macro f(a)", "endmacro", "f(1)", "m.content", "messages", "x", "'a'",
    "99999", "10**9", "*", "**", "~", "+", "/", "(", ")", "[", "]", "0", ".", "|", "tojson", "trim",
    "center(10**9)", "indent(10**8)", "join('b' * 1000)", "list", "range(99999)", "namespace()",
    "raise_exception('no')", "__class__", "loop.index", "generation", "endgeneration", "break",
    "include 'a'", "cycler", "lipsum()", "format", "'%99999d'", ESCAPE, "\ud800", "\n", " ",
)  # fmt: skip


@reader
def template(folder: Path) -> Reader:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\ud800"}]
    valid = (
        b"{%- for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<{{ m['role'] }}>"
        b"{{ m.content | trim }}{% set x = namespace(a=1) %}{% endfor %}{{ messages | tojson }}"
    )

    def read(text: str) -> None:
        for answer in (True, False):
            ChatTemplate(text, {"bos_token": "<s>"}, "file").render(talk, answer)

    damaged = changed_bytes(valid).map(lambda data: data.decode(errors="surrogateescape"))
    return read, st.one_of(damaged, st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join))


@reader
def own_checkpoint(folder: Path) -> Reader:
    small = dataclasses.replace(
        quantized_model().config, vocab_size=8, hidden_size=32, intermediate_size=32, num_layers=1
    )
    checkpoint.save(quantized_model(small, group_size=32), folder / "own")
    file = folder / "own" / "config.json"
    valid = json.loads(file.read_text())
    return reads(file, lambda: checkpoint.load(folder / "own")), changed_json(valid)


@reader
def results(folder: Path) -> Reader:
    settings = {"model": "m", "limit": None}
    file = folder / "results.jsonl"
    with Results(file, settings) as found:
        counts = dict.fromkeys(("rounds", "drafted", "tested", "accepted", "generated"), 3)
        found.add({"task": "gsm8k", "id": "1", "correct": True, "note": "", "text": "a",
                   "tokens": [1, 2], **counts})  # fmt: skip
        found.add({"task": "piqa", "id": "2", "correct": False, "correct per character": True,
                   "log_likelihoods": [-1.0, -2.5]})  # fmt: skip
        found.add({"task": "wikitext2", "id": "0", "nats": 31.5, "scored": 7})
        found.add({"task": "gsm8k", "id": "3", "error": "too long"})
    data = file.read_bytes()
    lines = [json.loads(line) for line in data.splitlines()]

    def read() -> None:
        with Results(file, settings) as found:
            for name, item in found.records:
                if name in TASKS:
                    record = found.get(name, item, TASKS[name].measured)
                    TASKS[name].counts([record])
                    if "error" not in record:
                        TASKS[name].metrics([record])

    changed = changed_json(lines).map(_as_lines)
    return reads(file, read), st.one_of(changed, changed_bytes(data))


def _as_lines(data: bytes) -> bytes:
    """The elements of a JSON list, one a line; what is not such a list as it is."""
    try:
        lines = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return b"".join(json.dumps(x).encode() + b"\n" for x in lines) if type(lines) is list else data


@reader
def datastore(folder: Path) -> Reader:
    place = folder / "store"
    Datastore.create([np.array([1, 2, 3]), np.array([2, 1])], 4).save(place)
    files = {file.name: file.read_bytes() for file in place.iterdir()}
    manifest = changed_json(json.loads(files["datastore.json"]))
    cases = [st.tuples(st.just("datastore.json"), manifest)]
    cases += [st.tuples(st.just(name), changed_bytes(data)) for name, data in files.items()]

    def read(case: tuple[str, bytes]) -> None:
        for name, data in (files | dict([case])).items():
            (place / name).write_bytes(data)
        Datastore.load(place)

    return read, st.one_of(*cases)


@reader
def prompts(folder: Path) -> Reader:
    lines = b'{"prompt": "a"}\n\n{"text": "b", "question": 1}\n'

    def read(case: tuple[str, bytes]) -> None:
        file = folder / case[0]
        file.write_bytes(case[1])
        read_prompts(file)

    json_lines = changed_json([{"prompt": "a"}, {"text": "b", "question": 1}]).map(_as_lines)
    plain = st.one_of(json_lines, changed_bytes(lines))
    packed = st.one_of(plain.map(gzip.compress), changed_bytes(gzip.compress(lines)))
    return read, st.one_of(
        st.tuples(st.sampled_from(("a.jsonl", "a.txt")), plain),
        st.tuples(st.sampled_from(("a.jsonl.gz", "a.gz")), packed),
    )


@reader
def task_files(folder: Path) -> Reader:
    write_tasks(folder)
    setup = Setup(quantized_model(), small_tokenizers.TINY, None)  # type: ignore[arg-type]
    tasks = {name: task for name, task in TASKS.items() if (folder / task.file).is_file()}
    files = {name: (folder / task.file).read_bytes() for name, task in tasks.items()}
    valid = {
        name: [json.loads(line) for line in data.splitlines()]
        for name, data in files.items()
        if tasks[name].file.endswith(".jsonl")
    }

    def read(case: tuple[str, bytes]) -> None:
        name, data = case
        file = folder / tasks[name].file
        file.write_bytes(data)
        try:
            tasks[name].entries(setup, folder, None)
        finally:
            file.write_bytes(files[name])

    changed = [
        st.tuples(st.just(name), changed_json(lines).map(_as_lines))
        for name, lines in valid.items()
    ]
    return read, st.one_of(*changed)


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates that take all of their time take less of it."""
    renderer.RENDERER.close()
    monkeypatch.setattr(renderer, "SECONDS", 0.2)
    yield
    renderer.RENDERER.close()


@functools.cache
def _count(name: str) -> int:
    return 3 if name == "own_checkpoint" else 15


@pytest.mark.parametrize("name", READERS)
def test_a_few_cases(name: str, tmp_path: Path) -> None:
    read, cases = READERS[name](tmp_path)
    fuzz_a_little(read, cases, _count(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", READERS)
def test_many_cases(name: str, tmp_path: Path) -> None:
    read, cases = READERS[name](tmp_path)
    print(f"{name}: {fuzz(read, cases, SECONDS / len(READERS))} cases")
