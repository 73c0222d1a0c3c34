"""Readers of models and tokenizers, and damaged and hostile files for them."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import strategies as st
from safetensors.numpy import save
from tokenizers import models, pre_tokenizers

from checkpoints_tools import checkpoint
from checkpoints_tools.chat.template import ChatTemplate, read_chat_template
from checkpoints_tools.gguf import open_gguf, read_gguf_tokenizer
from checkpoints_tools.huggingface import open_checkpoint
from checkpoints_tools.huggingface_config import read_config, read_quantization
from checkpoints_tools.tokenizer import Tokenizer, read_tokenizer
from tests.support import packers, small_tokenizers
from tests.support.fuzzing import Reader, reads
from tests.support.hf_directories import FIELDS, random_tensors, write_config, write_model
from tests.support.mutations import ESCAPE, changed_bytes, changed_json
from tests.support.random_models import quantized_model

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


def generation_config(folder: Path) -> Reader:
    write_config(folder)
    valid = {"eos_token_id": [2, 3], "pad_token_id": 0, "bos_token_id": 1}
    file = folder / "generation_config.json"
    return reads(file, lambda: read_config(folder)), changed_json(valid)


def index(folder: Path) -> Reader:
    file = write_model(folder) / "model.safetensors.index.json"
    valid = json.loads(file.read_text())
    return reads(file, lambda: open_checkpoint(folder)), changed_json(valid)


def config_and_tensors(folder: Path) -> Reader:
    """config.json of a directory whose tensors are there."""
    file = write_model(folder, shards=1) / "config.json"
    return reads(file, lambda: open_checkpoint(folder)), changed_json(json.loads(file.read_text()))


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


def tokenizer(folder: Path) -> Reader:
    backends = [getattr(each, "_backend", each) for each in _small_tokenizers()]
    cases = [changed_json(json.loads(backend.to_str())) for backend in backends]
    return reads(folder / "tokenizer.json", lambda: _use(read_tokenizer(folder))), st.one_of(*cases)


def _use(found: Tokenizer) -> None:
    for text in ("", "abc ab é\n<s> 大"):
        for special_tokens in (True, False):
            found.decode(found.encode(text, special_tokens))
    found.special_tokens()
    found.vocabulary()


def sentencepiece_model(folder: Path) -> Reader:
    pytest.importorskip("transformers")
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    written = io.BytesIO()
    trainer.train(
        sentence_iterator=iter(small_tokenizers.SENTENCES), model_writer=written, vocab_size=330,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    file = folder / "tokenizer.model"
    return reads(file, lambda: _use(read_tokenizer(folder))), changed_bytes(written.getvalue())


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


MORE_FIELDS = (  # of GGUF, which the valid files do not have
    *(f"llama.{name}" for name in ("expert_count", "rope.scale_linear", "attention.key_length")),
    *(f"llama.rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "finetuned")),
    *(f"tokenizer.ggml.{name}" for name in ("add_bos_token", "add_space_prefix", "eot_token_id")),
    "general.alignment", "split.count",
)  # fmt: skip


def gguf(folder: Path) -> Reader:
    pytest.importorskip("gguf")
    from tests.support import gguf_files

    small = dataclasses.replace(
        gguf_files.CONFIG, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=32,
    )  # fmt: skip
    file, tensors = folder / "model.gguf", gguf_files.random_tensors(small, "F32")
    fields = gguf_files.fields(config=small)
    scores = [-float(i) for i in range(small.vocab_size)]
    llama = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
    files = []
    for metadata in (fields, fields | llama):
        gguf_files.write_gguf(file, metadata, tensors)
        files.append(file.read_bytes())
    size = sum(values.nbytes for values, _ in tensors.values())

    def read_model() -> None:
        for _ in open_gguf(file).weights():
            pass

    def read_its_tokenizer() -> None:
        found = read_gguf_tokenizer(file)
        _use(found)
        found.chat([{"role": "user", "content": "a"}])

    def read(case: tuple[Callable[[], None], bytes]) -> None:
        file.write_bytes(case[1] + files[0][-size:])
        case[0]()

    def of_another_kind(case: tuple[str, object]) -> bytes:
        gguf_files.write_gguf(file, fields | llama | dict([case]), tensors)
        return file.read_bytes()[:-size]

    headers = [
        changed(data[:-size]) for data in files for changed in (changed_bytes, _changed_numbers)
    ]
    kinds = (1, 1.5, True, "a", ["a", "b"], [1, 2], [0.5], [True, False])
    names = sorted({*fields, *llama, *MORE_FIELDS})
    headers += [
        st.tuples(st.sampled_from(names), st.sampled_from(kinds)).map(of_another_kind)
    ] * len(headers)
    return read, st.tuples(st.sampled_from((read_model, read_its_tokenizer)), st.one_of(*headers))


def _changed_numbers(header: bytes) -> st.SearchStrategy[bytes]:
    """A header of GGUF with one number of four or eight bytes after a field's name replaced."""
    places = [found.end() for found in re.finditer(rb"[a-z]\.[a-z_.]+[a-z]", header)]
    values = (0, 1, 2, 3, 7, 31, 287, 288, 2**16, 2**31, 2**32 - 1, 0x7FC00000, 0xBF800000)
    return st.tuples(
        st.sampled_from(places), st.sampled_from((0, 4, 8)), st.sampled_from(values)
    ).map(
        lambda case: (
            header[: case[0] + case[1]]
            + struct.pack("<I", case[2])
            + header[case[0] + case[1] + 4 :]
        )
    )


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


def own_checkpoint(folder: Path) -> Reader:
    small = dataclasses.replace(
        quantized_model().config, vocab_size=8, hidden_size=32, intermediate_size=32, num_layers=1
    )
    checkpoint.save(quantized_model(small, group_size=32), folder / "own")
    file = folder / "own" / "config.json"
    valid = json.loads(file.read_text())
    return reads(file, lambda: checkpoint.load(folder / "own")), changed_json(valid)


READERS = (
    config,
    generation_config,
    index,
    config_and_tensors,
    safetensors,
    tokenizer,
    sentencepiece_model,
    tokenizer_config,
    gguf,
    template,
    own_checkpoint,
)
